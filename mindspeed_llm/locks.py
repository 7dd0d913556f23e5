"""A lock that one process holds at a time, by the operating system: it ends with the process, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import socket
import time
from pathlib import Path

_LOG = logging.getLogger("mindspeed_llm")
_LONGEST_NOTE = 1000
_held: set[int] = set()


class LockIsHeld(Exception):
    """Another process has the lock: `holder` is a phrase such as `process 7 on host since ...`, `note` its own note."""

    def __init__(self, holder: str, note: str) -> None:
        super().__init__(holder)
        self.holder, self.note = holder, note


class FileLock:
    """A lock in the file `path`, whose folder must exist. Processes that this one forks do not hold it on."""

    def __init__(self, path: Path, *, without_locks: str) -> None:
        """`without_locks`: what the log advises where the file system has no locks."""
        self.path, self._advice = path, without_locks
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object has taken the lock and not released it."""
        return self._descriptor is not None

    def take(self, note: str = "") -> None:
        """Take the lock and leave `note` (one line) for others to read.

        Raises:
            LockIsHeld: another process has it.
            OSError: the file cannot be made; FileNotFoundError where the folder is missing.
        """
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder, _, left = os.pread(descriptor, _LONGEST_NOTE, 0).decode(errors="replace").partition("\n")
                os.close(descriptor)
                raise LockIsHeld(holder or "unknown", left) from None
            except OSError as error:
                _LOG.warning("no locks in %s (%s): %s", self.path.parent, error.strerror, self._advice)
            if self._is_still_there(descriptor):
                break
            # Whoever held it has removed it in the meantime.
            os.close(descriptor)
        _close_in_forked_processes()
        self._descriptor = descriptor
        _held.add(descriptor)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {started}\n{note}".encode(), 0)

    def remove(self) -> None:
        """Remove the file while the lock is still held; `release` must follow."""
        self.path.unlink(missing_ok=True)

    def release(self) -> None:
        """Let the lock go, if it was taken."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _held.discard(descriptor)
            os.close(descriptor)

    def _is_still_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False


def _close_held() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


@functools.cache
def _close_in_forked_processes() -> None:
    """The system lets a lock go when the last copy of its descriptor is closed, and a forked worker may outlive a
    process that was killed.
    """
    os.register_at_fork(after_in_child=_close_held)
