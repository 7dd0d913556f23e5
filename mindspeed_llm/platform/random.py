"""Seeds, determinism, and the random state of a process as plain data."""

from __future__ import annotations

import logging
import os
import random
from typing import Any

import numpy as np
import torch

from mindspeed_llm.platform.device import device_module, device_type

# Read by the device libraries when they start, so they must be set before the first use of the device.
_DETERMINISM_ENVIRONMENT = {
    "npu": {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"},
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    "cpu": {},
}
_logger = logging.getLogger("mindspeed_llm")


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seed Python, numpy, torch and all devices, and switch deterministic algorithms on or off.

    Call it before the device is used (before `device.current_device`): the device libraries read their part of the
    environment once. Variables that the user has set are kept.

    Args:
        seed: any non-negative integer (numpy takes it modulo 2**32).
        deterministic: True makes two runs bit-equal; an operator without a deterministic version then raises.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    kind = device_type()
    if kind != "cpu":
        device_module().manual_seed_all(seed)
    if deterministic:
        # For child processes only (spawned data loader workers): this one has fixed its hash seed already.
        os.environ.setdefault("PYTHONHASHSEED", str(seed % 2**32))
        for name, value in _DETERMINISM_ENVIRONMENT[kind].items():
            os.environ.setdefault(name, value)
        # Filling every new buffer makes reads of uninitialised memory repeatable; it would cost a pass over each of
        # the sharded optimizer's and all-gather's buffers, which are always overwritten.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)


def rng_state() -> dict[str, Any]:
    """The state of all generators that training uses, as tensors, numbers and strings only.

    Plain values load with `torch.load(weights_only=True)`. Keys: "python", "numpy", "torch", "device_type" and
    "device" (None on cpu).
    """
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment]
    kind = device_type()
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [
            numpy_state["bit_generator"],
            torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            int(numpy_state["state"]["pos"]),
            int(numpy_state["has_gauss"]),
            float(numpy_state["gauss"]),
        ],
        "torch": torch.get_rng_state(),
        "device_type": kind,
        "device": None if kind == "cpu" else device_module().get_rng_state(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned.

    A state that another device type wrote restores all but the device's generator, with a warning: the numbers that
    the device draws (dropout) then differ from those of an uninterrupted run.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    kind = device_type()
    if state["device_type"] != kind:
        _logger.warning(
            "the random state was written on %s and is read on %s: the device's generator is not restored.",
            state["device_type"],
            kind,
        )
    elif state["device"] is not None:
        device_module().set_rng_state(state["device"])
