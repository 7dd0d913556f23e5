"""Warnings that are told once, however often their cause is met."""

import logging
from functools import cache

_LOG = logging.getLogger("mindspeed_llm")


@cache
def warn_once(text: str) -> None:
    """Log a warning unless this process has logged the same before."""
    _LOG.warning("%s", text)
