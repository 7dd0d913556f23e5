"""Pushing files to the disk while others are still being made: one thread that begins early and waits at the end."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from types import TracebackType

_SYNC_FILE_RANGE_WRITE = 2  # fcntl.h: begin to write the dirty pages of the range, do not wait for them


class WriteBack:
    """A thread that pushes files to the disk. A context manager: leaving it without `wait` forgets what is left.

    Left alone, the kernel keeps what is written in memory until a file is synced, and the disk is idle until then.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[int, int, int] | int | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._given_up = False
        self._begin = _sync_file_range()
        self._thread = threading.Thread(target=self._work, name="convert write back", daemon=True)
        self._thread.start()

    def begin(self, descriptor: int, start: int, stop: int) -> None:
        """Let the disk begin with a range of bytes that are complete."""
        self._jobs.put((descriptor, start, stop))

    def finish(self, descriptor: int) -> None:
        """Sync a file that is complete, and close it."""
        self._jobs.put(descriptor)

    def wait(self) -> None:
        """Wait until all files are on the disk.

        Raises:
            OSError: the disk did not take one.
        """
        self._jobs.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> WriteBack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._given_up = True
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, tuple):
                if self._begin is not None and not self._given_up:
                    descriptor, start, stop = job
                    self._begin(descriptor, start, stop - start, _SYNC_FILE_RANGE_WRITE)
                continue
            try:
                if not self._given_up and self._error is None:
                    os.fsync(job)
            except OSError as error:
                self._error = error
            finally:
                os.close(job)


def _sync_file_range() -> ctypes._NamedFuncPointer | None:
    """The system call of this name; None outside of Linux, where files are then pushed when they are complete."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call
