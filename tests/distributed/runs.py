"""Rows that run the whole training command on the ranks of the pool."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from mindspeed_llm import cli
from mindspeed_llm.fsdp2 import main as command
from mindspeed_llm.fsdp2.train import trainer
from mindspeed_llm.fsdp2.train.step import OptimizerStep, StepResult
from mindspeed_llm.platform import distributed


class _Watched(OptimizerStep):
    """An optimizer step that notes its samples and may send this process a signal."""

    seen: list[list[int]]
    stop_at: dict[int, int]

    def run(self, micro_batches: Sequence[dict[str, Any]], **options: Any) -> StepResult:
        self.seen.append([hash(tuple(row)) for batch in micro_batches for row in _rows(batch)])
        # The signal comes while the step is under way; the run learns of it in the next step's message.
        if self.stop_at.get(distributed.rank()) == len(self.seen):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().run(micro_batches, **options)


def _rows(batch: dict[str, Any]) -> list[list[int]]:
    """Input ids of the rows that count, without padding at the end; a row's ids tell it from every other."""
    rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
    return [ids for ids, labels in rows if any(label != -100 for label in labels)]


class _Kept(logging.Handler):
    """Keeps log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(
    *,
    argv: list[str],
    stop_at: dict[int, int] | None = None,
    patches: Sequence[str] = (),
    nodes: int = 1,
    folder: str | None = None,
) -> dict[str, Any]:
    """Run `train_fsdp2.py` with `argv` in this process.

    Args:
        stop_at: rank -> the step of this run, counted from 1, in which it gets SIGTERM.
        patches: names in `PATCHES`.
        nodes: simulate so many nodes; local ranks and `NODE` (which `{node}` in `argv` becomes) follow.
        folder: where the user stands.

    Returns:
        "code" (exit code), "error" ("Type: text" of the exception that ended the run, or None), "log" (the lines of
        this rank's log), "samples" (per step, a number for each of this rank's rows).
    """
    per_node = dist.get_world_size() // nodes
    rank = dist.get_rank()
    os.environ["LOCAL_RANK"] = str(rank % per_node)
    argv = [word.replace("{node}", str(rank // per_node)) for word in argv]
    seen: list[list[int]] = []
    watched = type("Watched", (_Watched,), {"seen": seen, "stop_at": stop_at or {}})
    kept = _Kept()
    logger = logging.getLogger("mindspeed_llm")
    logger.addHandler(kept)
    code, errors = None, []

    def noting(argv: list[str]) -> int:
        try:
            return command.main(argv)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            raise

    terminate = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.ExitStack() as stack:
            if folder is not None:
                stack.callback(os.chdir, os.getcwd())
                os.chdir(folder)
            stack.enter_context(mock.patch.object(trainer, "OptimizerStep", watched))
            for name in patches:
                stack.enter_context(PATCHES[name]())
            cli.run(noting, argv)
    except SystemExit as end:
        code = end.code
    finally:
        logger.removeHandler(kept)
        signal.signal(signal.SIGTERM, terminate)
    # The store that ranks wait on lives with rank 0, which must not leave first.
    dist.barrier()
    return {"code": code, "error": errors[0] if errors else None, "log": kept.lines, "samples": seen}


@contextlib.contextmanager
def optimizer_state_is_not_loaded() -> Iterator[None]:
    """A fault: the moments keep the values of a fresh start."""
    from mindspeed_llm.fsdp2.checkpoint import manager

    with (
        mock.patch.object(manager, "make_optimizer_tensors", lambda model, optimizer, entries: None),
        mock.patch.object(manager, "optimizer_tensors", lambda model, optimizer: {}),
    ):
        yield


@contextlib.contextmanager
def random_state_is_not_restored() -> Iterator[None]:
    """A fault: the generators stay where the start of the process left them."""
    from mindspeed_llm.platform import random

    with mock.patch.object(random, "set_rng_state", lambda state: None):
        yield


@contextlib.contextmanager
def data_starts_over() -> Iterator[None]:
    """A fault: the data of a resumed run begins at the first sample."""
    from mindspeed_llm.fsdp2.data.sources import MapTrainSource

    original = MapTrainSource.micro_batches

    def from_zero(self: MapTrainSource, start_step: int = 0) -> Iterator[list[dict[str, Any]]]:
        self._start = type(self._start)(step=self._start.step, samples=0)
        return original(self, start_step)

    with mock.patch.object(MapTrainSource, "micro_batches", from_zero):
        yield


@contextlib.contextmanager
def second_rank_cannot_write() -> Iterator[None]:
    """Rank 1 finds no space for its random state."""
    from mindspeed_llm.fsdp2.checkpoint import manager

    def refuse(path: Path, content: bytes) -> None:
        if distributed.rank() == 1:
            raise OSError(28, "No space left on device")
        path.write_bytes(content)

    with mock.patch.object(manager, "write_bytes", refuse):
        yield


PATCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "optimizer_state_is_not_loaded": optimizer_state_is_not_loaded,
    "random_state_is_not_restored": random_state_is_not_restored,
    "data_starts_over": data_starts_over,
    "second_rank_cannot_write": second_rank_cannot_write,
}


def choose(*, output: str, wanted: str) -> dict[str, Any]:
    """Choose the checkpoint to resume from; returns "chosen" (a directory or None), "error" and "log"."""
    from mindspeed_llm.checkpoints.storage import CheckpointError
    from mindspeed_llm.fsdp2.checkpoint.manager import CheckpointManager, RunFacts

    kept = _Kept()
    logger = logging.getLogger("mindspeed_llm")
    logger.addHandler(kept)
    chosen, error = None, None
    try:
        manager = CheckpointManager(
            Path(output),
            facts=RunFacts(topology={}, versions={}, config={}),
            total_limit=None,
            only_model=False,
            asynchronous=False,
        )
        found = manager.choose(wanted)
        chosen = str(found[0]) if found else None
    except CheckpointError as failure:
        error = str(failure)
    finally:
        logger.removeHandler(kept)
    return {"chosen": chosen, "error": error, "log": kept.lines}
