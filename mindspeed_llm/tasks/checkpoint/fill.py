"""Filling the tensors of laid out files: read, rearrange, write, by slabs and on several threads.

A slab is a run of bytes of one target tensor. It is put together in a buffer of at most `SLAB_BYTES` from views of the
mapped sources and written in one call, so that memory depends neither on the size of tensors nor on their number. A
slab that is one unbroken run of its source, too, is written straight from the mapping.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from mindspeed_llm.tasks.checkpoint.boxes import Box, shape_of, take, whole
from mindspeed_llm.tasks.checkpoint.plan import Target
from mindspeed_llm.tasks.checkpoint.sources import Source

SLAB_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True)
class OpenFile:
    """A file with room for its tensors, and where each begins."""

    path: Path
    targets: Sequence[Target]
    offsets: dict[str, int]


def fill(
    files: Iterator[OpenFile], source: Source, *, workers: int, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Write all tensors of `files`, and push each file to the disk when it is complete.

    Args:
        files: laid out one by one, when the threads are ready for the next.
        on_bytes: called with the number of bytes of each slab that was written.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="convert") as pool:
        running: deque[Future] = deque()
        try:
            for file in files:
                state = _FileState(file, source, stop, on_bytes)
                running += [pool.submit(state.work) for _ in range(workers)]
                # Two files at a time: one is filled while another is pushed to the disk.
                while len(running) > 2 * workers or (running and running[0].done()):
                    running.popleft().result()
            while running:
                running.popleft().result()
        except BaseException:
            stop.set()
            raise


class _FileState:
    """The slabs of one file, dealt out to the threads that work on it."""

    def __init__(
        self, file: OpenFile, source: Source, stop: threading.Event, on_bytes: Callable[[int], None] | None
    ) -> None:
        self._file, self._source, self._stop, self._on_bytes = file, source, stop, on_bytes
        self._lock = threading.Lock()
        self._slabs = ((target, slab) for target in file.targets for slab in slabs(target))
        self._descriptor: int | None = None
        self._working = 0
        self._finished = False

    def work(self) -> None:
        """Write slabs until none is left; the last thread to finish pushes the file to the disk."""
        with self._lock:
            if self._finished or self._stop.is_set():
                return
            self._working += 1
            if self._descriptor is None:
                self._descriptor = os.open(self._file.path, os.O_WRONLY)
        try:
            while not self._stop.is_set() and (job := self._next()) is not None:
                target, slab = job
                count = write_slab(self._descriptor, self._file.offsets[target.key], target, slab, self._source)
                if self._on_bytes is not None:
                    self._on_bytes(count)
        except BaseException:
            self._stop.set()
            raise
        finally:
            with self._lock:
                self._working -= 1
                last = self._working == 0
                self._finished |= last
            if last:
                if not self._stop.is_set():
                    os.fsync(self._descriptor)
                os.close(self._descriptor)

    def _next(self) -> tuple[Target, Box] | None:
        with self._lock:
            return next(self._slabs, None)


def slabs(target: Target, limit: int = SLAB_BYTES) -> Iterator[Box]:
    """Cut a tensor's view into boxes that are runs of its memory, of at most `limit` bytes (or one row)."""
    if not target.view:
        yield ()
    elif math.prod(target.view):
        yield from _slabs(whole(target.view), 0, limit // target.dtype.itemsize)


def _slabs(box: Box, axis: int, limit: int) -> Iterator[Box]:
    row = math.prod(shape_of(box)[axis + 1 :])
    start, stop = box[axis]
    if row > limit and axis + 1 < len(box):
        for index in range(start, stop):
            yield from _slabs((*box[:axis], (index, index + 1), *box[axis + 1 :]), axis + 1, limit)
        return
    step = max(limit // row, 1)
    for begin in range(start, stop, step):
        yield (*box[:axis], (begin, min(begin + step, stop)), *box[axis + 1 :])


def write_slab(descriptor: int, offset: int, target: Target, slab: Box, source: Source) -> int:
    """Put one slab together and write it to its place; gives the number of bytes."""
    values = assemble(target, slab, source)
    data = values.reshape(-1).view(torch.uint8).numpy().data
    position = offset + target.dtype.itemsize * _start(target.view, slab)
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], position + written)
    return len(data)


def assemble(target: Target, slab: Box, source: Source) -> torch.Tensor:
    """The values of one slab, contiguous: a view of the source where that is possible."""
    buffer: torch.Tensor | None = None
    shape = shape_of(slab)
    for name, piece in target.pieces:
        clipped = piece.clip_mg(slab)
        if clipped is None:
            continue
        for hf_box, values in source.read(name, clipped.hf_box):
            ordered = clipped.as_mg(values, len(shape))
            whole_slab = ordered.numel() == math.prod(shape) and ordered.dtype == target.dtype
            if whole_slab and ordered.is_contiguous():
                return ordered
            if buffer is None:
                buffer = torch.empty(shape, dtype=target.dtype)
                if target.padding is not None:
                    buffer.zero_()
            place = tuple(
                (start - origin, stop - origin)
                for (start, stop), (origin, _) in zip(clipped.to_mg(hf_box), slab, strict=True)
            )
            take(buffer, place).copy_(_turned(ordered))
    return torch.zeros(shape, dtype=target.dtype) if buffer is None else buffer


def _turned(values: torch.Tensor) -> torch.Tensor:
    """`values`, contiguous where it is a transposed matrix: torch has a fast way to turn a contiguous matrix over into
    a contiguous one, and is three times slower where either is part of something larger.
    """
    matrix = values.squeeze()
    if matrix.dim() != 2 or matrix.stride(0) != 1:
        return values
    return matrix.t().contiguous().t().contiguous().view(values.shape)


def _start(view: Sequence[int], slab: Box) -> int:
    """The row-major index of a slab's first element."""
    index = 0
    for size, (start, _) in zip(view, slab, strict=True):
        index = index * size + start
    return index
