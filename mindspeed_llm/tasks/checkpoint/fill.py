"""Filling the tensors of laid out files: read, rearrange, write; by slabs and on several threads.

On the way the checksum of what is written is computed: of the values themselves, not of what the file gives back, so
that it tells whatever becomes of them later. The disk is told to begin with each slab that is complete.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mindspeed_llm.tasks.checkpoint import crc32
from mindspeed_llm.tasks.checkpoint.boxes import Box
from mindspeed_llm.tasks.checkpoint.plan import Target
from mindspeed_llm.tasks.checkpoint.slabs import assemble, slab_start, slabs
from mindspeed_llm.tasks.checkpoint.sources import Source
from mindspeed_llm.tasks.checkpoint.write_back import WriteBack

_PART_BYTES = 2**19
"""Small enough to stay in a core's cache between being summed up and being written."""


@dataclass(frozen=True, kw_only=True)
class OpenFile:
    """A file with room for its tensors, and where each begins."""

    path: Path
    targets: Sequence[Target]
    offsets: Mapping[str, int]
    checksums: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Where the file itself holds the CRC-32 of a tensor's bytes, as 4 bytes each."""


def fill(
    files: Iterator[OpenFile],
    source: Source,
    *,
    write_back: WriteBack,
    workers: int,
    on_bytes: Callable[[int], None] | None = None,
) -> dict[Path, int]:
    """Write all tensors of `files`, and hand each file to `write_back` when it is complete.

    Args:
        files: laid out one by one, when the threads are ready for the next.
        on_bytes: called with the number of bytes of each slab that was written.

    Returns:
        The CRC-32 of each file.
    """
    stop = threading.Event()
    checksums: dict[Path, int] = {}
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="convert") as pool:
        running: deque[Future] = deque()
        try:
            for file in files:
                state = _FileState(file, source, write_back, stop, checksums, on_bytes)
                running += [pool.submit(state.work) for _ in range(workers)]
                # Two files at a time: while the last threads end one, the first ones begin the other.
                while len(running) > 2 * workers or (running and running[0].done()):
                    running.popleft().result()
            while running:
                running.popleft().result()
        except BaseException:
            stop.set()
            raise
    return checksums


class _FileState:
    """The slabs of one file, dealt out to the threads that work on it."""

    def __init__(
        self,
        file: OpenFile,
        source: Source,
        write_back: WriteBack,
        stop: threading.Event,
        checksums: dict[Path, int],
        on_bytes: Callable[[int], None] | None,
    ) -> None:
        self._file, self._source, self._write_back = file, source, write_back
        self._stop, self._checksums, self._on_bytes = stop, checksums, on_bytes
        self._lock = threading.Lock()
        self._targets = sorted(file.targets, key=lambda target: file.offsets[target.key])
        self._slabs = ((target, slab) for target in self._targets for slab in slabs(target))
        self._parts: dict[int, tuple[int, int]] = {}
        """Slabs that are written: where they begin -> CRC, number of bytes."""
        self._descriptor: int | None = None
        self._working = 0
        self._finished = False

    def work(self) -> None:
        """Write slabs until none is left; the last thread to finish hands the file on."""
        with self._lock:
            if self._finished or self._stop.is_set():
                return
            self._working += 1
            if self._descriptor is None:
                self._descriptor = os.open(self._file.path, os.O_RDWR)
            descriptor = self._descriptor
        try:
            while not self._stop.is_set() and (job := self._next()) is not None:
                self._write(descriptor, *job)
        except BaseException:
            self._stop.set()
            raise
        finally:
            with self._lock:
                self._working -= 1
                last = not self._working
                self._finished |= last
            if last:
                self._close(descriptor)

    def _next(self) -> tuple[Target, Box] | None:
        with self._lock:
            return next(self._slabs, None)

    def _write(self, descriptor: int, target: Target, slab: Box) -> None:
        start = self._file.offsets[target.key] + target.dtype.itemsize * slab_start(target.view, slab)
        count, crc = write_slab(descriptor, start, target, slab, self._source)
        self._parts[start] = (crc, count)
        self._write_back.begin(descriptor, start, start + count)
        if self._on_bytes is not None:
            self._on_bytes(count)

    def _close(self, descriptor: int) -> None:
        try:
            if not self._stop.is_set():
                self._checksums[self._file.path] = self._sum_up(descriptor)
        except BaseException:
            self._stop.set()
            raise
        finally:
            if self._stop.is_set():
                os.close(descriptor)
            else:
                self._write_back.finish(descriptor)

    def _sum_up(self, descriptor: int) -> int:
        """The CRC of the file, whose own checksums are put in first."""
        slabs_left = deque(sorted(self._parts.items()))
        of_targets = []
        for target in self._targets:
            end = self._file.offsets[target.key] + target.nbytes
            parts = []
            while slabs_left and slabs_left[0][0] < end:
                parts.append(slabs_left.popleft()[1])
            assert sum(count for _, count in parts) == target.nbytes, f"{target.key} is not written in full"
            of_targets.append(crc32.joined(parts))
            for place in self._file.checksums.get(target.key, ()):
                os.pwrite(descriptor, of_targets[-1].to_bytes(4, "little"), place)
        parts, at = [], 0
        for target, crc in zip(self._targets, of_targets, strict=True):
            if target.nbytes:
                start = self._file.offsets[target.key]
                parts += [(crc32.of_range(descriptor, at, start), start - at), (crc, target.nbytes)]
                at = start + target.nbytes
        size = os.fstat(descriptor).st_size
        return crc32.joined([*parts, (crc32.of_range(descriptor, at, size), size - at)])


def write_slab(descriptor: int, position: int, target: Target, slab: Box, source: Source) -> tuple[int, int]:
    """Put one slab together and write it to its place; gives the number of bytes, and their CRC-32."""
    values = assemble(target, slab, source)
    data = values.reshape(-1).view(torch.uint8).numpy().data
    crc = 0
    for start in range(0, len(data), _PART_BYTES):
        part = data[start : start + _PART_BYTES]
        crc = zlib.crc32(part, crc)
        written = 0
        while written < len(part):
            written += os.pwrite(descriptor, part[written:], position + start + written)
    return len(data), crc
