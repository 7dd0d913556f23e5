"""When garbage is collected, seen by Python's own callbacks."""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from mindspeed_llm.training.garbage import GarbageCollection


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations that were collected; those of Python's own too, as long as it collects."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def steps(garbage: GarbageCollection, collections: list[int]) -> list[int]:
    """Steps after which a collection came, of ten; none may come of itself."""
    found = []
    for step in range(1, 11):
        kept = [[] for _ in range(2000)]  # more objects than Python lets live without a collection
        before = len(collections)
        garbage.step(step)
        found += [step] * (len(collections) - before)
        del kept
    return found


def test_at_fixed_steps_only(collections: list[int]) -> None:
    args = Namespace(manual_gc=True, manual_gc_interval=4, manual_gc_eval=True)
    with GarbageCollection(args) as garbage:
        assert not gc.isenabled() and collections[-1] == 2
        collections.clear()
        assert steps(garbage, collections) == [4, 8]
        assert collections == [2, 2]
        with garbage.evaluation():
            assert collections == [2, 2, 2]
        assert collections == [2, 2, 2, 0]
    assert gc.isenabled()


def test_neither_steps_nor_evaluations(collections: list[int]) -> None:
    args = Namespace(manual_gc=True, manual_gc_interval=0, manual_gc_eval=False)
    with GarbageCollection(args) as garbage:
        collections.clear()
        assert steps(garbage, collections) == []
        with garbage.evaluation():
            pass
        assert collections == []


def test_without_the_flag_python_collects() -> None:
    args = Namespace(manual_gc=False, manual_gc_interval=4, manual_gc_eval=True)
    with GarbageCollection(args) as garbage:
        assert gc.isenabled()
        with garbage.evaluation():
            assert gc.isenabled()
