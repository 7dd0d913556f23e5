"""What is said when an evaluation is ended from outside, with Ctrl-C or by a signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def tells_when_ended(tell: Callable[[], str]) -> Iterator[None]:
    """Within it, SIGTERM and Ctrl-C print the line that `tell` gives on stderr, and then do what they always do."""
    if threading.current_thread() is not threading.main_thread():  # others may set no handlers
        yield
        return

    def on_terminate(number: int, frame: object) -> None:
        _print(tell())
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    except KeyboardInterrupt:
        _print(tell())
        raise
    finally:
        # None: a handler that was not set from Python, which cannot be put back.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def how_far(finished: int | None, total: int) -> str:
    """The line about an evaluation that has ended early; `finished` None: its samples are not kept."""
    if finished is None:
        return "the evaluation was ended; its samples are not kept, as the weights cannot be told from others"
    if not finished:
        return f"the evaluation was ended before any of {total} samples was stored; the same command begins anew"
    return (
        f"the evaluation was ended: {finished} of {total} samples are finished and stored; the same command goes on "
        "from there"
    )


def _print(line: str) -> None:
    # A new line first: a progress bar may stand in this one.
    print(f"\n{line}" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)
