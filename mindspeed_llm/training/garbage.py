"""`--manual-gc`: garbage is collected at fixed steps, on all ranks at once, so that none waits for another's pause."""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager


class GarbageCollection:
    """Does nothing without `--manual-gc`. As a context it takes Python's own collection away, and gives it back."""

    def __init__(self, args: Namespace) -> None:
        self._manual = args.manual_gc
        self._interval, self._around_evaluations = args.manual_gc_interval, args.manual_gc_eval
        self._was_enabled = gc.isenabled()

    def __enter__(self) -> GarbageCollection:
        if self._manual:
            self._was_enabled = gc.isenabled()
            gc.disable()
            gc.collect()
        return self

    def __exit__(self, *_: object) -> None:
        if self._manual and self._was_enabled:
            gc.enable()

    def step(self, iteration: int) -> None:
        """To be called after each step."""
        if self._manual and self._interval and iteration % self._interval == 0:
            gc.collect()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation: all before it, and what it has left young behind it."""
        if not (self._manual and self._around_evaluations):
            yield
            return
        gc.collect()
        yield
        gc.collect(generation=0)
