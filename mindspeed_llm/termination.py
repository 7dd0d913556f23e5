"""The end of a run from outside: SIGTERM as a flag that a training loop looks at, and what is said of an early end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

TERMINATED_EXIT_CODE = 128 + signal.SIGTERM


class TerminationSignal:
    """Within this context SIGTERM only sets `received`; the training loop ends at the next step, on all ranks
    together.
    """

    def __init__(self) -> None:
        self.received = False
        self._previous: Any = None

    def __enter__(self) -> TerminationSignal:
        self._previous = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True


@contextlib.contextmanager
def tells_when_ended(tell: Callable[[], str]) -> Iterator[None]:
    """Within it, SIGTERM and Ctrl-C print the line that `tell` gives on stderr, and then do what they always do; an
    empty line is not printed.

    Only the main thread may set handlers, and who has one for SIGTERM already knows what to do: there nothing changes.
    """

    def show() -> None:
        line = tell()
        if line:
            # A progress bar may stand in the line of a terminal.
            begin = "\n" if sys.stderr.isatty() else ""
            # Not print: a signal may have come in the middle of one.
            os.write(2, f"{begin}{line}\n".encode())

    def terminate(number: int, frame: FrameType | None) -> None:
        show()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    takes_over = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    )
    if takes_over:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt:
        show()
        raise
    finally:
        if takes_over:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
