"""Logging: one line per record on stdout, `LEVEL [YYYY-mm-dd HH:MM:SS] >> message`."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable

ROOT_NAME = "mindspeed_llm"
_LINE_FORMAT = "%(levelname)s [%(asctime)s] >> %(message)s"
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


class _LineHandler(logging.Handler):
    """Writes whole lines to the current stdout, or to `line_writer` while a progress bar owns the terminal."""

    line_writer: Callable[[str], None] | None = None
    _is_reported = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        try:
            if self.line_writer is not None:
                self.line_writer(line)
            else:
                # One write per line: lines of several processes on one terminal then do not mix.
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
        except (OSError, ValueError) as error:  # ValueError: a stream that was closed in this process
            # It must not end a training run, and is said once, not with every line.
            if not self._is_reported:
                self._is_reported = True
                self._report(error)
            if isinstance(error, BrokenPipeError):
                self._drop_output()

    @staticmethod
    def _report(error: Exception) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"log lines cannot be written to stdout ({error}); the run goes on", file=sys.stderr, flush=True)

    @staticmethod
    def _drop_output() -> None:
        """Nobody reads any more. Python would try to write what is left at its exit, and end with an error."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


def get_logger(name: str = ROOT_NAME) -> logging.Logger:
    """The logger called `name`; names outside "mindspeed_llm" are put under it."""
    if name != ROOT_NAME and not name.startswith(ROOT_NAME + "."):
        name = f"{ROOT_NAME}.{name}"
    return logging.getLogger(name)


def setup_logging(rank: int | None = None, *, level: int = logging.INFO) -> None:
    """Configure the "mindspeed_llm" loggers of this process; calling it again replaces the configuration.

    Args:
        rank: global rank; None reads torchrun's RANK (0 when unset). Ranks above 0 log warnings and errors only.
        level: lowest level that rank 0 shows.
    """
    if rank is None:
        text = os.environ.get("RANK", "0")
        rank = int(text) if text.isdecimal() else 0
    logger = logging.getLogger(ROOT_NAME)
    for handler in list(logger.handlers):
        if isinstance(handler, _LineHandler):
            logger.removeHandler(handler)
    handler = _LineHandler()
    handler.setFormatter(logging.Formatter(_LINE_FORMAT, _TIME_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(level if rank == 0 else max(level, logging.WARNING))
    logger.propagate = False  # libraries that configure the root logger would print every line twice


def redirect_lines(writer: Callable[[str], None] | None) -> None:
    """Send log lines to `writer` (without line end) instead of stdout; None ends that. Used by the progress bar."""
    for handler in logging.getLogger(ROOT_NAME).handlers:
        if isinstance(handler, _LineHandler):
            handler.line_writer = writer
