"""A kill at any moment of publishing leaves a folder from which a run goes on, and in which nothing is lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mindspeed_llm.files import TEMPORARY_SUFFIX
from mindspeed_llm.training.checkpointing.layout import TRACKER, iteration_name, iterations_in, read_tracker
from mindspeed_llm.training.checkpointing.publishing import NOTE, finish_interrupted, look, publish

_OPERATIONS = ("rename", "replace", "mkdir", "unlink", "fsync")


class Killed(BaseException):
    """Stands for the end of the process."""


@contextmanager
def killed_at(number: int) -> Iterator[list[int]]:
    """Raise `Killed` instead of the `number`-th operation on the disk."""
    done = [0]

    def wrapped(operation: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if done[0] == number:
                raise Killed
            done[0] += 1
            return operation(*arguments, **options)

        return call

    patches = {name: wrapped(getattr(os, name)) for name in _OPERATIONS}
    with mock.patch.multiple(os, **patches):
        yield done


def make(folder: Path, iterations: list[int], tracker: int | None) -> None:
    for iteration in iterations:
        path = folder / iteration_name(iteration)
        path.mkdir(parents=True)
        (path / "content").write_text(f"old {iteration}")
    if tracker is not None:
        (folder / TRACKER).write_text(str(tracker))


def unfinished(folder: Path, iteration: int) -> Path:
    path = folder / (iteration_name(iteration) + TEMPORARY_SUFFIX)
    path.mkdir(parents=True)
    (path / "content").write_text(f"new {iteration}")
    return path


def contents(folder: Path) -> list[str]:
    """What all checkpoints hold, set aside or not."""
    return sorted(path.read_text() for path in folder.rglob("content"))


# (there before, tracker, the run's last checkpoint, the one to publish, what a reader then finds, what is set aside)
CASES: dict[str, tuple[list[int], int | None, int | None, int, list[int], list[int]]] = {
    "the first of all": ([], None, None, 2, [2], []),
    "the next one": ([3, 5], 5, 5, 6, [3, 5, 6], []),
    "a new run where another one saved": ([3, 5, 9], 9, None, 4, [4], [3, 5, 9]),
    "a new run that meets the same step": ([4], 4, None, 4, [4], [4]),
    "a run that went back": ([3, 5, 7], 7, 3, 5, [3, 5], [5, 7]),
    "a run that went back and saves elsewhere": ([3, 5, 7], 7, 3, 6, [3, 6], [5, 7]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_moment(tmp_path: Path, case: str) -> None:
    before, tracker, last, iteration, after, aside = CASES[case]
    everything = sorted([*(f"old {number}" for number in before), f"new {iteration}"])
    outcomes = set()
    for number in range(1000):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder, before, tracker)
        temporary = unfinished(folder, iteration)
        with killed_at(number) as done:
            try:
                publish(folder, iteration, temporary, last=last)
            except Killed:
                pass
            else:
                break
        seen = look(folder)
        path = folder / iteration_name(iteration) / "content"
        is_new = seen.tracker.iteration == iteration and path.exists() and path.read_text() == f"new {iteration}"
        outcomes.add(is_new)
        if is_new:
            assert (seen.tracker.iteration, list(seen.iterations)) == (iteration, after)
        finish_interrupted(folder)
        if is_new:
            assert contents(folder) == everything
            assert sorted(p.parent.name for p in folder.glob("set_aside.*/*/content")) == list(
                map(iteration_name, aside)
            )
        else:
            assert (read_tracker(folder).iteration, iterations_in(folder)) == (tracker, before)
            assert contents(folder) == sorted(f"old {number}" for number in before)
        assert list(look(folder).iterations) == iterations_in(folder) == (after if is_new else before)
        left = {path.name for path in folder.iterdir() if path.is_file()}
        assert left <= {TRACKER}, left
        # The next attempt succeeds.
        publish(folder, iteration + 10, unfinished(folder, iteration + 10), last=iteration if is_new else last)
        assert read_tracker(folder).iteration == iteration + 10
    assert outcomes == {False, True}
    assert done[0] == number >= 8
    assert (read_tracker(folder).iteration, iterations_in(folder)) == (iteration, after)
    assert not (folder / NOTE).exists()


def test_the_tracker_moves_last(tmp_path: Path) -> None:
    make(tmp_path, [5], 5)
    real, seen = os.replace, []

    def replace(source: Any, target: Any) -> None:
        if Path(target).name == TRACKER:
            seen.append((tmp_path / iteration_name(6) / "content").read_text())
        real(source, target)

    with mock.patch.object(os, "replace", replace):
        publish(tmp_path, 6, unfinished(tmp_path, 6), last=5)
    assert seen == ["new 6"]
    assert (tmp_path / TRACKER).read_text() == "6"


def test_what_others_left_is_kept(tmp_path: Path) -> None:
    make(tmp_path, [5], 5)
    (tmp_path / "set_aside.1").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "release").mkdir()
    publish(tmp_path, 7, unfinished(tmp_path, 7), last=None)
    assert (tmp_path / "set_aside.2" / iteration_name(5)).is_dir()
    assert (tmp_path / "metrics.jsonl").exists() and (tmp_path / "release").exists()


def test_a_note_that_is_no_note_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, [5], 5)
    for text in ("", "[]", '{"iteration": 5}', '{"iteration": "x", "foreign": [], "aside": 1}'):
        (tmp_path / NOTE).write_text(text)
        finish_interrupted(tmp_path)
        assert look(tmp_path).iterations == (5,)
    shutil.rmtree(tmp_path / iteration_name(5))
    assert look(tmp_path).iterations == ()


def test_tracker(tmp_path: Path) -> None:
    assert read_tracker(tmp_path / "nowhere") == read_tracker(tmp_path)
    for text, iteration, is_release in (("12\n", 12, False), ("release", None, True)):
        (tmp_path / TRACKER).write_text(text)
        found = read_tracker(tmp_path)
        assert (found.iteration, found.is_release, found.problem) == (iteration, is_release, None)
    for content in (b"", b"-3", b"1.5", b"\xff\xfe", "²".encode()):
        (tmp_path / TRACKER).write_bytes(content)
        found = read_tracker(tmp_path)
        assert found.iteration is None and str(tmp_path / TRACKER) in str(found.problem)
