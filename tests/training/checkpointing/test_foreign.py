"""Checkpoints as Megatron-LM writes them are gone on from, and ours are what megatron-core reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.toys import TOYS
from tests.training.checkpointing.conftest import SCHEDULE, Workplace
from tests.training.checkpointing.test_resume import ALLTOALL, DROPOUT, EP, TP

pytestmark = pytest.mark.distributed
WRITE, READ = "tests.training.checkpointing.foreign:write", "tests.training.checkpointing.foreign:read"
# toy, format (and how megatron-core is asked to name tensors), ranks, flags
ROWS: dict[str, tuple[str, str, int, list[str]]] = {
    "torch": ("llama", "torch", 2, [TP, "2", *DROPOUT]),
    "torch bf16": ("llama", "torch", 2, ["--bf16", TP, "2", *DROPOUT]),
    "torch bf16 distributed": ("llama", "torch", 2, ["--bf16", "--use-distributed-optimizer", *DROPOUT]),
    "torch_dist": ("llama", "torch_dist layers together", 2, [TP, "2", *DROPOUT]),
    "torch_dist bf16 distributed": ("llama", "torch_dist", 2, ["--bf16", "--use-distributed-optimizer", *DROPOUT]),
    "torch_dist experts": ("mixtral", "torch_dist layers together", 2, [EP, "2", *ALLTOALL]),
    "torch_dist experts apart": ("mixtral", "torch_dist apart", 2, [EP, "2", "--moe-grouped-gemm", *ALLTOALL]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ROWS)
def test_what_megatron_writes_is_gone_on_from(place: Workplace, tmp_path: Path, name: str) -> None:
    toy, kind, ranks, flags = ROWS[name]
    expected = write(place, toy, kind, ranks, flags, tmp_path)
    resumed = place.train(toy, ranks, flags, steps=4, load=tmp_path)
    assert [(run["error"], run.get("start")) for run in resumed] == [(None, 2)] * ranks
    for before, after in zip(expected, resumed, strict=True):
        assert [tuple(step[:3]) for step in after["steps"]] == [tuple(step) for step in before]
    assert resumed[0]["state"].floating_point_operations == 1.5
    assert any("was written by another program: it has no manifest.json" in line for line in resumed[0]["log"])


def test_buffers_of_megatron_are_refused(place: Workplace, tmp_path: Path) -> None:
    flags = ["--use-distributed-optimizer"]
    write(place, "llama", "torch_dist dp_reshardable", 2, flags, tmp_path)
    for run in place.train("llama", 2, flags, steps=3, load=tmp_path):
        assert "in the form dp_reshardable, expected fully_reshardable" in run["error"]
        assert run["error"].endswith("or give --no-load-optim")
    (run, _) = place.train("llama", 2, [*flags, "--no-load-optim"], steps=3, load=tmp_path)
    assert (run["error"], run["start"]) == (None, 2)


def write(place: Workplace, toy: str, kind: str, ranks: int, flags: list[str], target: Path) -> list[Any]:
    return place.pool.run(
        WRITE,
        ranks=ranks,
        folder=str(place.toy(toy)),
        vocabulary=TOYS[toy]["vocab_size"],
        steps=2,
        flags=[*SCHEDULE, *flags],
        target=str(target),
        kind=kind,
    )


def test_megatron_core_reads_what_is_written_here(place: Workplace, tmp_path: Path) -> None:
    flags = [*SCHEDULE, TP, "2"]
    runs = place.train("llama", 2, flags, steps=2, save=tmp_path, saves=[(2, "torch_dist", tmp_path)])
    found = place.pool.run(
        READ, ranks=2, folder=str(place.toy("llama")), flags=flags, source=str(tmp_path / "iter_0000002")
    )
    for run, rank in zip(runs, found, strict=True):
        assert rank["weights"] == run["weights"][0]
        assert (rank["iteration"], rank["samples"], rank["version"]) == (2, 16, 3.0)
    assert len(set(found[0]["moments"].values())) > 10
