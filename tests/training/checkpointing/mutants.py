"""Faults of resuming that tests must notice, each a replacement of one function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from mindspeed_llm.training.checkpointing.content import train_state as _train_state

_ROOM = "mindspeed_llm.training.checkpointing"


def _nothing(*_: Any, **__: Any) -> None:
    """Leaves out what should be done."""


def _replaced(name: str, function: Callable[..., Any] = _nothing) -> Callable[[], Any]:
    return lambda: mock.patch(f"{_ROOM}.{name}", function)


def _one_batch_back(content: Any, args: Any, folder: Any) -> Any:
    state = _train_state(content, args, folder)
    state.consumed_train_samples -= args.global_batch_size
    return state


MUTANTS: dict[str | None, Callable[[], Any]] = {
    None: contextlib.nullcontext,
    "no moments": _replaced("optimizer_state.fill_plain"),
    "no step count": _replaced("optimizer_state.set_steps"),
    "no random numbers": _replaced("rng.restore"),
    "no schedule": _replaced("scheduler_state.restore"),
    "no loss scale": _replaced("optimizer_state.set_scaler"),
    "samples again": _replaced("content.train_state", _one_batch_back),
}
