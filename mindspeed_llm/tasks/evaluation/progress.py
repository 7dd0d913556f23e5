"""How far an evaluation is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.observability.progress import ProgressBar

_LOG = get_logger("evaluation")
_LINE_EVERY_S = 30.0


class Progress:
    """Call it with (samples done, samples to do). Shows the part of one copy of the model."""

    def __init__(self, *, enabled: bool, show_bar: bool | None = None, copies: int = 1) -> None:
        """
        Args:
            enabled: whether this rank shows anything.
            show_bar: None: whether stderr is a terminal.
            copies: of the model; each works on a share of the samples.
        """
        self._enabled = enabled
        self._show_bar = sys.stderr.isatty() if show_bar is None else show_bar
        self._copies = copies
        self._bar: ProgressBar | None = None
        self._started = self._told = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Show that so many samples are answered."""
        if not self._enabled:
            return
        if self._show_bar:
            if self._bar is None:
                self._bar = ProgressBar(total_steps=total, show=True, unit=_unit(self._copies))
            self._bar.update(done)
            return
        now = time.monotonic()
        if now - self._told >= _LINE_EVERY_S or done == total:
            self._told = now
            _LOG.info("%s", progress_line(done, total, now - self._started, self._copies))

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def progress_line(done: int, total: int, elapsed_s: float, copies: int = 1) -> str:
    """Samples, rate and the time that is left at this rate; of one copy of the model where there are several."""
    rate = done / max(elapsed_s, 1e-9)
    left = round((total - done) / rate) if done else 0
    clock = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
    return f"answered {done} of {total} {_unit(copies)}s, {rate:.2f} samples/s, {clock} left"


def _unit(copies: int) -> str:
    return "sample" if copies == 1 else f"(share 1 of {copies}) sample"
