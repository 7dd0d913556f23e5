"""Filling the tensors of laid out files: read, rearrange, write, read back; by slabs and on several threads.

While threads fill a file, the hash of what is complete is computed behind them, from what the file gives back, and the
disk already takes it. So neither the hash nor the disk comes on top of the time that filling takes.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.tasks.checkpoint.boxes import Box
from mindspeed_llm.tasks.checkpoint.plan import Target
from mindspeed_llm.tasks.checkpoint.slabs import assemble, slab_start, slabs
from mindspeed_llm.tasks.checkpoint.sources import Source
from mindspeed_llm.tasks.checkpoint.write_back import WriteBack

_READ_BYTES = 2**20
"""Small enough to stay in a core's cache between being read and being hashed."""
_AHEAD_BYTES = 16 * 2**20
"""How much of a file is complete before it is hashed, and before the disk is told to begin with it."""


@dataclass(frozen=True, kw_only=True)
class OpenFile:
    """A file with room for its tensors, and where each begins."""

    path: Path
    targets: Sequence[Target]
    offsets: dict[str, int]


def fill(
    files: Iterator[OpenFile],
    source: Source,
    *,
    write_back: WriteBack,
    workers: int,
    hashed: bool = True,
    on_bytes: Callable[[int], None] | None = None,
) -> dict[Path, str]:
    """Write all tensors of `files`, and hand each file to `write_back` when it is complete.

    Args:
        files: laid out one by one, when the threads are ready for the next.
        hashed: whether to read the files back and hash them.
        on_bytes: called with the number of bytes of each slab that was written.

    Returns:
        The SHA-256 of each file, as hexadecimal digits; empty where that is not wanted.
    """
    stop = threading.Event()
    hashes: dict[Path, str] = {}
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="convert") as pool:
        running: deque[Future] = deque()
        try:
            for file in files:
                state = _FileState(file, source, write_back, stop, hashes if hashed else None, on_bytes)
                running += [pool.submit(state.work) for _ in range(workers)]
                # Two files at a time: while the last threads end one, the first ones begin the other.
                while len(running) > 2 * workers or (running and running[0].done()):
                    running.popleft().result()
            while running:
                running.popleft().result()
        except BaseException:
            stop.set()
            raise
    return hashes


class _FileState:
    """The work on one file, dealt out to the threads: slabs in the order of the file, the hash behind them."""

    def __init__(
        self,
        file: OpenFile,
        source: Source,
        write_back: WriteBack,
        stop: threading.Event,
        hashes: dict[Path, str] | None,
        on_bytes: Callable[[int], None] | None,
    ) -> None:
        self._file, self._source, self._write_back = file, source, write_back
        self._stop, self._hashes, self._on_bytes = stop, hashes, on_bytes
        self._lock = threading.Lock()
        in_order = sorted(file.targets, key=lambda target: file.offsets[target.key])
        self._slabs = ((target, slab) for target in in_order for slab in slabs(target))
        self._upcoming = next(self._slabs, None)
        self._being_written: set[int] = set()
        self._descriptor: int | None = None
        self._size = 0
        self._working = 0
        self._finished = False
        self._digest = hashlib.sha256()
        self._is_hashing = False
        self._hashed_up_to = 0
        self._begun_up_to = 0

    def work(self) -> None:
        """Do what there is to do until nothing is left; the last thread hands the file on."""
        with self._lock:
            if self._finished or self._stop.is_set():
                return
            self._working += 1
            if self._descriptor is None:
                self._descriptor = os.open(self._file.path, os.O_RDWR)
                self._size = os.fstat(self._descriptor).st_size
        try:
            while not self._stop.is_set() and (job := self._next()) is not None:
                job()
        except BaseException:
            self._stop.set()
            raise
        finally:
            self._leave(self._descriptor)

    def _leave(self, descriptor: int) -> None:
        with self._lock:
            self._working -= 1
            if self._working:
                return
            self._finished = True
        if self._stop.is_set():
            os.close(descriptor)
            return
        if self._hashes is not None:
            assert self._hashed_up_to == self._size, f"{self._file.path}: {self._hashed_up_to} bytes are hashed"
            self._hashes[self._file.path] = self._digest.hexdigest()
        self._write_back.finish(descriptor)

    def _next(self) -> Callable[[], Any] | None:
        with self._lock:
            complete = self._complete_up_to()
            if self._upcoming is not None and complete - self._begun_up_to >= _AHEAD_BYTES:
                assert self._descriptor is not None
                self._write_back.begin(self._descriptor, self._begun_up_to, complete)
                self._begun_up_to = complete
            enough = _AHEAD_BYTES if self._upcoming is not None else 1
            if self._hashes is not None and not self._is_hashing and complete - self._hashed_up_to >= enough:
                self._is_hashing = True
                return partial(self._hash, complete)
            if self._upcoming is None:
                return None
            target, slab = self._upcoming
            position = self._position(target, slab)
            self._upcoming = next(self._slabs, None)
            self._being_written.add(position)
            return partial(self._write, target, slab, position)

    def _complete_up_to(self) -> int:
        """All bytes before this one are in the file as they will stay."""
        if self._being_written:
            return min(self._being_written)
        return self._size if self._upcoming is None else self._position(*self._upcoming)

    def _position(self, target: Target, slab: Box) -> int:
        return self._file.offsets[target.key] + target.dtype.itemsize * slab_start(target.view, slab)

    def _write(self, target: Target, slab: Box, position: int) -> None:
        assert self._descriptor is not None
        count = write_slab(self._descriptor, position, target, slab, self._source)
        with self._lock:
            self._being_written.remove(position)
        if self._on_bytes is not None:
            self._on_bytes(count)

    def _hash(self, stop: int) -> None:
        assert self._descriptor is not None
        buffer = bytearray(_READ_BYTES)
        at = self._hashed_up_to
        while at < stop and not self._stop.is_set():
            view = memoryview(buffer)[: min(stop - at, _READ_BYTES)]
            count = os.preadv(self._descriptor, [view], at)
            if not count:
                raise OSError(f"{self._file.path} has become shorter while it was being written")
            self._digest.update(view[:count])
            at += count
        with self._lock:
            self._hashed_up_to = at
            self._is_hashing = False


def write_slab(descriptor: int, position: int, target: Target, slab: Box, source: Source) -> int:
    """Put one slab together and write it to its place; gives the number of bytes."""
    values = assemble(target, slab, source)
    data = values.reshape(-1).view(torch.uint8).numpy().data
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], position + written)
    return len(data)
