"""Rows that run the whole command `pretrain_gpt.py` on the ranks of the pool."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist


def pretrain(*, argv: list[str], mutant: str | None = None) -> int:
    """Run the command with `argv`; its exit code."""
    from mindspeed_llm.training.main import main

    logger = logging.getLogger("mindspeed_llm")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        with MUTANTS[mutant]() if mutant else contextlib.nullcontext():
            code = main(argv)
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    # The store that ranks wait on lives with rank 0, which must not leave first.
    dist.barrier()
    return code


def error(*, flags: str) -> str:
    """What a run with `flags`, on top of those of a small model, ends with: the kind of the error, and its text."""
    from mindspeed_llm.training.pretrain import pretrain as run
    from tests.training.arguments.lines import arguments

    try:
        return f"exit code {run(arguments(flags, world_size=dist.get_world_size()))}"
    except Exception as found:
        return f"{type(found).__name__}: {found}"


def largest(*, values: list[float]) -> float:
    """What the ranks agree on where each pipeline stage has its own gradient norm."""
    from mindspeed_llm.training.initialize import initialize, shutdown
    from tests.training.arguments.lines import arguments

    ranks = dist.get_world_size()
    initialize(arguments(f"--pipeline-model-parallel-size {ranks}", world_size=ranks))
    try:
        from mindspeed_llm.training.train_step import _largest

        return _largest(values[dist.get_rank()])
    finally:
        shutdown()


@contextlib.contextmanager
def labels_not_shifted() -> Iterator[None]:
    """A fault: each token is to predict itself."""
    with _changed_batches(lambda batch: batch | {"labels": batch["tokens"]}):
        yield


@contextlib.contextmanager
def ends_of_documents_count() -> Iterator[None]:
    """A fault: the end of a document is to predict the first token of the next one."""
    with _changed_batches(lambda batch: batch | {"loss_mask": batch["loss_mask"] * 0 + 1}):
        yield


@contextlib.contextmanager
def next_global_batch() -> Iterator[None]:
    """A fault: the samples of a step are those of the step behind it."""
    from mindspeed_llm.training.data import iterator

    original = iterator._micro_batches

    def one_later(starts: range, args: Any, rank: int, size: int) -> Iterator[range]:
        return original([*starts[1:], *starts[:1]], args, rank, size)

    with mock.patch.object(iterator, "_micro_batches", one_later):
        yield


@contextlib.contextmanager
def _changed_batches(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    from mindspeed_llm.training.data import datasets

    original = datasets.make_batch
    with mock.patch.object(datasets, "make_batch", lambda *words, **named: change(original(*words, **named))):
        yield


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    function.__name__: function for function in (labels_not_shifted, ends_of_documents_count, next_global_batch)
}
