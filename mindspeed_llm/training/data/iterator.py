"""Which samples a data-parallel rank gets in which micro batch, and reading them ahead.

Samples are counted over the whole run. A global batch that begins at sample p holds p .. p + G - 1; in micro step m of
it, row j of rank r of R is sample p + (m * R + r) * B + j:

    G = 8, B = 2        micro step 0       micro step 1
    R = 2, rank 0       p, p+1             p+4, p+5
           rank 1       p+2, p+3           p+6, p+7

So the samples of a step depend neither on the number of ranks nor on the micro batch, and a run that goes on with other
numbers, from any number of consumed samples, misses none and repeats none. This is the order of Megatron's samplers
(--dataloader-type single).

Every rank makes its batches by itself, also those of one data-parallel rank that share them as tensor or pipeline
ranks. Nothing is sent around: which tokens a batch has follows from the arguments and files that all of them have, and
reading it is the copy of a few kilobytes from a memory map whose pages the processes of a machine share.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from mindspeed_llm.platform.device import supports_pin_memory
from mindspeed_llm.training.data.batches import Batch
from mindspeed_llm.training.data.datasets import Samples

_Job = TypeVar("_Job")


def train_batches(
    dataset: Samples, args: Namespace, *, rank: int, size: int, consumed: int, device: torch.device | None = None
) -> Iterator[Batch]:
    """The micro batches of a data-parallel rank, from a sample on, up to the last whole global batch of the data.

    Args:
        dataset: samples in the order of training.
        args: `global_batch_size`, `micro_batch_size` and `num_workers` are read.
        rank: data-parallel rank.
        size: number of data-parallel ranks; with the micro batch size it must divide the global batch size.
        consumed: samples of training so far, all ranks together.
        device: where the tensors are wanted; None leaves them in host memory.
    """
    starts = range(consumed, len(dataset.rows) - args.global_batch_size + 1, args.global_batch_size)
    return _batches(dataset, args, _micro_batches(starts, args, rank, size), device)


def eval_batches(
    dataset: Samples, args: Namespace, *, rank: int, size: int, consumed: int, device: torch.device | None = None
) -> Iterator[Batch]:
    """As `train_batches`, without end: behind the last sample comes the first.

    Megatron goes on from one validation to the next, each of --eval-iters global batches, so that one iterator serves
    them all; the data are laid out for the whole run, and the end is met only where a resumed run evaluates more.
    """
    starts = itertools.count(consumed, args.global_batch_size)
    return _batches(dataset, args, _micro_batches(starts, args, rank, size), device)


def consumed_valid_samples(args: Namespace, iteration: int) -> int:
    """Samples of validation that a run has read when `iteration` steps are done."""
    return iteration // args.eval_interval * args.eval_iters * args.global_batch_size


def _micro_batches(starts: Iterable[int], args: Namespace, rank: int, size: int) -> Iterator[range]:
    """The samples of each micro batch of a rank; `starts` are the first samples of the global batches."""
    rows = args.micro_batch_size
    count, rest = divmod(args.global_batch_size, rows * size)
    assert not rest and 0 <= rank < size, "arguments are validated"
    for start in starts:
        for micro_step in range(count):
            first = start + (micro_step * size + rank) * rows
            yield range(first, first + rows)


def _batches(
    dataset: Samples, args: Namespace, micro_batches: Iterator[range], device: torch.device | None
) -> Iterator[Batch]:
    def read(samples: range) -> Batch:
        rows = [dataset.rows[sample % len(dataset.rows)] for sample in samples]
        return dataset.batch(rows, source=f"{dataset.name} data, samples {samples[0]} to {samples[-1]},")

    batches = _in_order(micro_batches, read, args.num_workers)
    return batches if device is None else _on_device(batches, device)


def _in_order(jobs: Iterator[_Job], work: Callable[[_Job], Batch], num_threads: int) -> Iterator[Batch]:
    """The results of `work`, in order, done ahead by `num_threads` threads; without threads when they are asked for.

    Threads, not processes: nearly all of the work is copying from memory maps, which leaves Python running, and a fork
    of a process that has used an accelerator is not safe.
    """
    if not num_threads:
        yield from map(work, jobs)
        return
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="read-samples")
    waiting: deque[Future[Batch]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(work, job))
            if len(waiting) > 2 * num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    is_pinned = supports_pin_memory()
    for batch in batches:
        # Pinned here, not by the reading threads: theirs would be the first device, not this process's.
        yield {
            name: (tensor.pin_memory() if is_pinned else tensor).to(device, non_blocking=is_pinned)
            for name, tensor in batch.items()
        }
