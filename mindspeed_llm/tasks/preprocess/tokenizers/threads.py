"""The threads of the Rust library of tokenizers are switched off: whoever has work for several cores runs it there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_SWITCH = "TOKENIZERS_PARALLELISM"


@contextmanager
def without_threads() -> Iterator[None]:
    """Let the library encode batches in the thread that calls it; forked processes inherit it.

    A process that is forked after the library has started its threads has none of them, and would wait for them
    forever.
    """
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before
