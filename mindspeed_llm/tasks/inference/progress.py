"""How far a run over many texts is: a bar on a terminal, else a line from time to time."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from mindspeed_llm.observability.log import redirect_lines

_LOG = logging.getLogger("mindspeed_llm")
SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts items and tokens, and shows rates and the time that is left.

    Args:
        name: what is counted.
        total: how many there will be.
        show: whether this rank shows anything.
        show_bar: a bar, or lines; None asks whether stderr is a terminal.
    """

    def __init__(self, name: str, total: int, *, show: bool = True, show_bar: bool | None = None) -> None:
        self._name, self._total, self._show = name, total, show
        self._done = self._tokens = 0
        self._start = self._last_line = time.monotonic()
        self._bar: Any = None
        if show and (sys.stderr.isatty() if show_bar is None else show_bar):
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit=f" {name}", dynamic_ncols=True, file=sys.stderr)
            redirect_lines(lambda line: tqdm.write(line, file=sys.stdout))

    @property
    def done(self) -> int:
        """Items that are done."""
        return self._done

    @property
    def total(self) -> int:
        """Items that there will be."""
        return self._total

    def add(self, tokens: int, items: int = 1) -> None:
        """So many more are done."""
        self._done += items
        self._tokens += tokens
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._tokens / max(now - self._start, 1e-9):.1f} tokens/s", refresh=False)
            self._bar.update(items)
        elif self._show and (now - self._last_line >= SECONDS_BETWEEN_LINES or self._done == self._total):
            self._last_line = now
            _LOG.info(self.line(now - self._start))

    def line(self, seconds: float) -> str:
        """The state in one line, `seconds` after the start."""
        rate = self._done / max(seconds, 1e-9)
        text = f"{self._done} of {self._total} {self._name} ({self._done / max(self._total, 1):.0%}), {rate:.2f}/s"
        text += f", {self._tokens / max(seconds, 1e-9):.1f} tokens/s"
        left = (self._total - self._done) / rate if rate else 0.0
        minutes, rest = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        is_over = self._done == self._total
        return text + (f" in {seconds:.1f} s" if is_over else f", ETA {hours}:{minutes:02d}:{rest:02d}")

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            redirect_lines(None)
            self._bar.close()
            self._bar = None
