"""Memory figures of the CPU, against an allocation of known size."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mindspeed_llm.platform import memory

SIZE_GIB = 0.125
BYTES = int(SIZE_GIB * 1024**3)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_DEVICE", "cpu")


def test_an_allocation_shows_in_the_present_and_the_peak_figure() -> None:
    if not memory.reset_peak():
        pytest.skip("this system cannot reset the peak of the resident memory")
    before, peak_before = memory.memory_allocated_gb(), memory.max_memory_allocated_gb()
    assert peak_before == pytest.approx(before, abs=0.02)
    block = torch.full((BYTES,), 1, dtype=torch.uint8)
    assert memory.memory_allocated_gb() - before == pytest.approx(SIZE_GIB, abs=0.02)
    del block
    assert memory.memory_allocated_gb() - before == pytest.approx(0.0, abs=0.02)
    assert memory.max_memory_allocated_gb() - peak_before == pytest.approx(SIZE_GIB, abs=0.02)
    assert memory.max_memory_reserved_gb() == memory.max_memory_allocated_gb()
    assert memory.reset_peak()
    assert memory.max_memory_allocated_gb() - before == pytest.approx(0.0, abs=0.02)


def test_without_procfs_the_peak_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = memory.max_memory_allocated_gb()
    monkeypatch.setattr(memory, "_STATUS_FILE", "/nonexistent/status")
    monkeypatch.setattr(memory, "_CLEAR_REFS_FILE", "/nonexistent/clear_refs")
    # The kernel's own peak since the start of the process: at least the one that may have been reset since.
    assert memory.memory_allocated_gb() == memory.max_memory_allocated_gb() >= peak - 0.02
    assert not memory.reset_peak()


def test_host_memory_adds_up() -> None:
    psutil = pytest.importorskip("psutil")
    figures = memory.host_memory()
    total = psutil.virtual_memory().total / 1024**3
    assert figures.used_gb + figures.available_gb == pytest.approx(total)
    assert figures.usage_percent == pytest.approx(100 * figures.used_gb / total)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_freed_blocks_return_to_the_system() -> None:
    # In a process of its own: the setting holds for good. Blocks below glibc's largest own limit, with small ones that
    # stay between them.
    script = (
        "import torch\n"
        "from mindspeed_llm.platform import memory\n"
        "import sys\n"
        "if sys.argv[1] == 'on': assert memory.return_freed_blocks(1 << 20)\n"
        "torch.zeros(1 << 23); torch.zeros(1 << 22)\n"  # the limit grows with freed blocks
        "pairs = [(torch.ones(1 << 20), torch.ones(1000)) for _ in range(64)]\n"
        "full = memory.memory_allocated_gb()\n"
        "small = [pair[1] for pair in pairs]\n"
        "del pairs\n"
        "print(full - memory.memory_allocated_gb())\n"
    )
    freed = {
        switch: float(
            subprocess.run([sys.executable, "-c", script, switch], capture_output=True, text=True, check=True).stdout
        )
        for switch in ("on", "off")
    }
    assert freed["on"] > 0.24  # 64 blocks of 4 MiB
    assert freed["off"] < 0.1
