"""SIGTERM as a flag that a training loop looks at."""

from __future__ import annotations

import signal
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
