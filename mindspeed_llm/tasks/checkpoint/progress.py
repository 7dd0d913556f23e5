"""How far a conversion is: a bar on a terminal, plain lines elsewhere; and the memory that it needs meanwhile."""

from __future__ import annotations

import sys
import threading
import time

_BAR_EVERY_S = 0.2
_LINE_EVERY_S = 10.0
_MEMORY_EVERY_S = 0.02
_BAR_WIDTH = 30
_STATUS_FILE = "/proc/self/status"


class Progress:
    """Counts bytes from any thread, and shows them. A context manager: leaving gives the terminal back."""

    def __init__(self, *, show: bool = True, bar: bool | None = None) -> None:
        """Args: show False only counts; bar None asks whether stderr is a terminal."""
        self._show = show
        self._bar = sys.stderr.isatty() if bar is None else bar
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._what = ""
        self._began = self._shown = self._looked = time.monotonic()
        self.peak_anonymous_bytes = anonymous_bytes()
        """The most memory seen that belongs to no file, None where the system does not say."""

    def begin(self, what: str, total: int = 0) -> None:
        """Start counting anew; `what` is being done, to `total` bytes (0: until it is over)."""
        with self._lock:
            self._what, self._total, self._done = what, total, 0
            self._began = time.monotonic()
            self._look(self._began)
            if self._bar:
                self._draw(self._began)

    def add(self, nbytes: int) -> None:
        """So many bytes more are done."""
        now = time.monotonic()
        with self._lock:
            self._done += nbytes
            if now - self._looked >= _MEMORY_EVERY_S:
                self._look(now)
            if now - self._shown >= (_BAR_EVERY_S if self._bar else _LINE_EVERY_S):
                self._draw(now)

    def text(self, now: float) -> str:
        """What is being done, how much of it, how fast, and how long it will still take."""
        if not self._total:
            return self._what
        rate = self._done / max(now - self._began, 1e-9)
        left = (self._total - self._done) / rate if rate else 0.0
        return (
            f"{self._what} {self._done / self._total:4.0%}, {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, "
            f"{rate / 1e9:.2f} GB/s, ETA {_duration(left)}"
        )

    def _look(self, now: float) -> None:
        self._looked = now
        found = anonymous_bytes()
        if found is not None and self.peak_anonymous_bytes is not None:
            self.peak_anonymous_bytes = max(self.peak_anonymous_bytes, found)

    def _draw(self, now: float) -> None:
        self._shown = now
        if not self._show:
            return
        if not self._bar:
            print(self.text(now), flush=True)
            return
        full = round(_BAR_WIDTH * self._done / self._total) if self._total else 0
        bar = f"|{'#' * full}{' ' * (_BAR_WIDTH - full)}| " if self._total else ""
        # Back to the start of the line, and clear what is left of the one before.
        sys.stderr.write(f"\r{bar}{self.text(now)}\x1b[K")
        sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._show and self._bar:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def anonymous_bytes() -> int | None:
    """Memory of this process that belongs to no file; mapped weights do. None where the system does not say."""
    try:
        with open(_STATUS_FILE, encoding="ascii") as lines:
            for line in lines:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
