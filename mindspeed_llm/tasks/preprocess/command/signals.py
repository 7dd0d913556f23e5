"""Ctrl-C and SIGTERM end a run at a place where it can clean up.

Both raise an exception where they are met, but not while processes are started: there Python drops exceptions, or is
left with half of what it needs to end them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_owner: int | None = None
_received: int | None = None
_is_deferred = False


class Terminated(SystemExit):
    """The end by SIGTERM; `code` is 143, as shells have it."""


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Answer to both signals within the block, in this process and not in those that it forks."""
    global _owner, _received
    _owner, _received = os.getpid(), None
    before = {number: signal.signal(number, _receive) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        # Other work of this process has not been told to end.
        _owner = _received = None


def _receive(number: int, frame: FrameType | None) -> None:
    global _received
    if os.getpid() == _owner:
        is_second = _received is not None
        _received = number
        if is_second or not _is_deferred:
            raise_received()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let a signal wait until the end of the block; a second one does not wait."""
    global _is_deferred
    _is_deferred = True
    try:
        yield
    finally:
        _is_deferred = False
    raise_received()


def raise_received() -> None:
    """Raise KeyboardInterrupt or Terminated where such a signal has come since `listening` began."""
    if _received == signal.SIGINT:
        raise KeyboardInterrupt
    if _received is not None:
        raise Terminated(128 + _received)
