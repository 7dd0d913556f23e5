"""Device detection, its override, and what follows from it."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.platform import device, distributed, operators
from tests.platform import npu_stub


@pytest.fixture(autouse=True)
def _fresh_detection(monkeypatch: pytest.MonkeyPatch):
    """Detection is cached for the life of a process; each test starts without the cache and leaves none."""
    monkeypatch.delenv("MINDSPEED_DEVICE", raising=False)
    device._detected_type.cache_clear()
    device._is_available.cache_clear()
    yield
    device._detected_type.cache_clear()
    device._is_available.cache_clear()


class _FakeDeviceModule(types.ModuleType):
    """A device module of torch with two devices."""

    selected: int | None = None
    synchronized = 0

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def set_device(self, index: int) -> None:
        self.selected = index

    def get_device_name(self) -> str:
        return "Ascend910B3"

    def synchronize(self) -> None:
        self.synchronized += 1


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> _FakeDeviceModule:
    """A machine with two NPUs: torch_npu imports, and torch.npu knows the devices."""
    module = _FakeDeviceModule("torch.npu")
    monkeypatch.setitem(sys.modules, "torch_npu", npu_stub.make_stub())
    monkeypatch.setattr(torch, "npu", module, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: getattr(torch, kind))
    return module


def test_npu_is_preferred(npu: _FakeDeviceModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.device_type() == "npu"
    assert distributed.collective_backend() == "hccl"
    assert device.device_name() == "Ascend910B3"
    assert device.supports_pin_memory()
    device.synchronize()
    assert npu.synchronized == 1
    assert [operators.implementation(name) for name in ("rms_norm", "rotary", "swiglu", "attention")] == [
        "npu_rms_norm",
        "npu_rotary_mul",
        "npu_swiglu",
        "npu_fusion_attention",
    ]


def test_cuda_comes_before_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.device_type() == "cuda"
    assert distributed.collective_backend() == "nccl"


def test_cpu_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.device_type() == "cpu"
    assert distributed.collective_backend() == "gloo"
    assert device.current_device(5) == torch.device("cpu")
    assert not device.supports_pin_memory()
    assert device.device_name()


def test_an_npu_library_that_cannot_load_is_reported_and_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path
) -> None:
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device._logger, "propagate", True)
    assert device.device_type() == "cpu"
    assert "libhccl.so" in caplog.text


def test_the_override_wins(npu: _FakeDeviceModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_DEVICE", " CPU ")
    assert device.device_type() == "cpu"
    monkeypatch.setenv("MINDSPEED_DEVICE", "")
    assert device.device_type() == "npu"


@pytest.mark.parametrize("value", ["gpu", "cuda:0"])
def test_an_unknown_override_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_DEVICE", value)
    with pytest.raises(UserError, match=f"MINDSPEED_DEVICE='{value}': expected one of npu, cuda, cpu"):
        device.device_type()


def test_an_override_without_such_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("MINDSPEED_DEVICE", "cuda")
    with pytest.raises(UserError, match=r"MINDSPEED_DEVICE='cuda': no such device .* offers 'cpu'"):
        device.device_type()


def test_current_device_selects_by_local_rank(npu: _FakeDeviceModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "device", lambda kind, index: (kind, index))  # torch does not know "npu" here
    assert device.current_device(1) == ("npu", 1)
    assert npu.selected == 1
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert device.current_device() == ("npu", 0)
    with pytest.raises(UserError, match="local rank 2 has no npu device: this process sees 2"):
        device.current_device(2)
