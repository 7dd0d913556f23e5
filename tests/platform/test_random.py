"""Seeds, random state as plain data, and the determinism switch."""

from __future__ import annotations

import io
import os
import random as python_random

import numpy as np
import pytest
import torch

from mindspeed_llm.platform import random


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINDSPEED_DEVICE", "cpu")
    state = random.rng_state()
    environment = dict(os.environ)
    fill = torch.utils.deterministic.fill_uninitialized_memory
    yield
    random.set_rng_state(state)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    os.environ.clear()
    os.environ.update(environment)


def _draw() -> tuple[float, float, float, float, list[float]]:
    return (
        python_random.random(),
        python_random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(3).tolist(),
    )


@pytest.mark.parametrize("seed", [0, 42, 2**32 + 7])
def test_a_seed_decides_every_draw(seed: int) -> None:
    random.seed_everything(seed, deterministic=False)
    first = _draw()
    random.seed_everything(seed, deterministic=False)
    assert _draw() == first
    random.seed_everything(seed + 1, deterministic=False)
    assert all(mine != other for mine, other in zip(_draw(), first, strict=True))


def test_the_state_survives_a_restricted_load() -> None:
    random.seed_everything(1, deterministic=False)
    _draw()  # one gauss and one randn leave a cached second value behind, which belongs to the state
    buffer = io.BytesIO()
    torch.save(random.rng_state(), buffer)
    expected = _draw()
    random.seed_everything(2, deterministic=False)
    buffer.seek(0)
    random.set_rng_state(torch.load(buffer, weights_only=True))
    assert _draw() == expected


def test_a_state_of_another_device_is_restored_but_for_the_device(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random._logger, "propagate", True)
    state = random.rng_state() | {"device_type": "npu", "device": torch.zeros(4)}
    expected = _draw()
    random.set_rng_state(state)
    assert _draw() == expected
    assert "written on npu and is read on cpu" in caplog.text


def test_deterministic_switches_on_and_off() -> None:
    random.seed_everything(0, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    random.seed_everything(0, deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("cpu", set()),
        ("cuda", {"CUBLAS_WORKSPACE_CONFIG"}),
        ("npu", {"HCCL_DETERMINISTIC", "CLOSE_MATMUL_K_SHIFT"}),
    ],
)
def test_the_environment_is_written_only_when_asked_and_users_values_stay(
    kind: str, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Generators:
        @staticmethod
        def manual_seed_all(seed: int) -> None: ...

    every_name = {"CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC", "CLOSE_MATMUL_K_SHIFT", "PYTHONHASHSEED"}
    for name in every_name:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(random, "device_type", lambda: kind)
    monkeypatch.setattr(random, "device_module", lambda: Generators)
    random.seed_everything(7, deterministic=False)
    assert not every_name & os.environ.keys()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    random.seed_everything(7, deterministic=True)
    assert every_name & os.environ.keys() == names | {"PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG"}
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
