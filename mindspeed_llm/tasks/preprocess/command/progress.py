"""How far the work is: records, tokens, their rates and the time that is left."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from mindspeed_llm.observability.log import redirect_lines
from mindspeed_llm.tasks.preprocess.chunks import Summary

_LOG = logging.getLogger("mindspeed_llm")
_SECONDS_BETWEEN_LINES = 1.0


class Progress:
    """A bar on a terminal, else a line after every `interval` records, though at most one a second.

    `total` is the expected number of records, which may be an estimate; None where it is not known. `done` says what an
    earlier run has finished: it counts in the share, not in the rates.
    """

    def __init__(
        self, name: str, *, total: int | None, interval: int, done: Summary, show_bar: bool | None = None
    ) -> None:
        self._name, self._total, self._interval = name, total, interval
        self._done_records, self._done_tokens = done.num_records, done.num_tokens
        self._start = self._last_time = time.monotonic()
        self._last_records = done.num_records
        self._bar: Any = None
        if sys.stderr.isatty() if show_bar is None else show_bar:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, initial=done.num_records, unit=" records", desc=name, dynamic_ncols=True, file=sys.stderr
            )
            redirect_lines(lambda line: tqdm.write(line, file=sys.stdout))

    def update(self, summary: Summary) -> None:
        """Show the state, when it is time; `summary` counts everything, the finished parts included."""
        if self._bar is not None:
            seconds = max(time.monotonic() - self._start, 1e-9)
            rate = (summary.num_tokens - self._done_tokens) / seconds
            self._bar.set_postfix_str(f"{_short(rate)} tokens/s", refresh=False)
            self._bar.update(summary.num_records - self._bar.n)
            return
        now = time.monotonic()
        reached = summary.num_records // self._interval > self._last_records // self._interval
        if reached and now - self._last_time >= _SECONDS_BETWEEN_LINES:
            self._last_time, self._last_records = now, summary.num_records
            _LOG.info(self.line(summary, now - self._start))

    def line(self, summary: Summary, seconds: float) -> str:
        """The state in one line, `seconds` after the start."""
        rate = (summary.num_records - self._done_records) / max(seconds, 1e-9)
        tokens = (summary.num_tokens - self._done_tokens) / max(seconds, 1e-9)
        text = f"{self._name}: {summary.num_records} records"
        if self._total is not None:
            share = min(summary.num_records / max(self._total, 1), 1)
            text += f" of about {self._total} ({share:.0%})"
        text += f", {rate:.0f} records/s, {_short(tokens)} tokens/s"
        if self._total is not None and rate > 0:
            text += f", ETA {_duration(max(self._total - summary.num_records, 0) / rate)}"
        return text

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            redirect_lines(None)
            self._bar.close()
            self._bar = None


def _short(number: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
