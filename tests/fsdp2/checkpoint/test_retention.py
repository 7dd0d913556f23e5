"""What is set aside, replaced or removed; and that a crash at any step between loses nothing and mixes nothing."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mindspeed_llm.fsdp2.checkpoint import retention
from mindspeed_llm.fsdp2.checkpoint.manifest import find_checkpoints, steps_in
from tests.support.mounts import mounted


def make(folder: Path, *steps: int, content: str = "old") -> None:
    for step in steps:
        (folder / f"global_step_{step}").mkdir(parents=True)
        (folder / f"global_step_{step}" / "content").write_text(f"{content} {step}")


def contents(output: Path) -> dict[str, str]:
    """Relative directory -> what the checkpoint in it holds; hidden and temporary names are included."""
    return {str(path.parent.relative_to(output)): path.read_text() for path in output.rglob("content")}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    monkeypatch.setattr(logging.getLogger("mindspeed_llm"), "propagate", True)
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


class Crash(BaseException):
    """As a power cut: nothing after it runs."""


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Raise Crash instead of the n-th change of a directory."""
    originals = {name: getattr(os, name) for name in ("rename", "replace", "mkdir", "unlink")}

    def arm(number: int) -> None:
        left = [number]

        def changing(name: str) -> Callable[..., object]:
            def change(*args: object, **kwargs: object) -> object:
                left[0] -= 1
                if left[0] < 0:
                    raise Crash
                return originals[name](*args, **kwargs)

            return change

        for name in originals:
            monkeypatch.setattr(os, name, changing(name))

    yield arm


def disarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()


def test_an_earlier_run_moves_as_a_whole(tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    make(tmp_path / "checkpoints", 5, 20)
    (tmp_path / "checkpoints" / "latest").write_text("global_step_20\n")
    make(tmp_path / "hf", 20)
    retention.set_aside_all(tmp_path)
    assert find_checkpoints(tmp_path) == [] and steps_in(tmp_path / "hf") == []
    expected = {"checkpoints.1/global_step_5", "checkpoints.1/global_step_20", "hf.1/global_step_20"}
    assert contents(tmp_path).keys() == expected
    assert (tmp_path / "checkpoints.1" / "latest").read_text() == "global_step_20\n"
    (line,) = lines()
    assert f"exports and checkpoints in {tmp_path}" in line and "hf.1" in line and "checkpoints.1" in line
    # Again: the next number, the same for both folders; and nothing where there is nothing.
    make(tmp_path / "checkpoints", 7)
    retention.set_aside_all(tmp_path)
    retention.set_aside_all(tmp_path)
    assert contents(tmp_path).keys() == expected | {"checkpoints.2/global_step_7"}
    assert len(lines()) == 2


def test_a_crash_while_a_run_is_set_aside(
    tmp_path: Path, crash_at: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = False
    for number in range(20):
        output = tmp_path / str(number)
        make(output / "checkpoints", 5, 20)
        make(output / "hf", 20)
        crash_at(number)
        try:
            retention.set_aside_all(output)
            finished = True
        except Crash:
            pass
        disarm(monkeypatch)
        # Either all of the old checkpoints are still taken for the run's, or none is.
        assert [step for step, _ in find_checkpoints(output)] in ([5, 20], [])
        (output / "checkpoints").mkdir(exist_ok=True)
        retention.finish_interrupted(output / "checkpoints")
        retention.set_aside_all(output)
        assert contents(output) == {
            "checkpoints.1/global_step_5": "old 5",
            "checkpoints.1/global_step_20": "old 20",
            "hf.1/global_step_20": "old 20",
        }
        if finished:
            break
    assert finished and number > 2


def test_a_crash_while_steps_are_set_aside(
    tmp_path: Path, crash_at: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = False
    for number in range(20):
        folder = tmp_path / str(number) / "checkpoints"
        make(folder, 10, 15, 20)
        crash_at(number)
        try:
            retention.set_aside_steps(folder, [15, 20])
            finished = True
        except Crash:
            pass
        disarm(monkeypatch)
        retention.finish_interrupted(folder)
        assert [step for step, _ in steps_in(folder)] in ([10, 15, 20], [10])
        assert sorted(contents(folder.parent).values()) == ["old 10", "old 15", "old 20"]
        # A run that publishes 15 now keeps it over the next start.
        retention.set_aside_steps(folder, [step for step, _ in steps_in(folder) if step > 10])
        make(folder, 15, content="new")
        retention.finish_interrupted(folder)
        assert (folder / "global_step_15" / "content").read_text() == "new 15"
        assert {path.name for path in folder.iterdir()} == {"global_step_10", "global_step_15"}
        if finished:
            break
    assert finished and number > 4


def test_a_crash_while_a_step_is_replaced(
    tmp_path: Path, crash_at: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = False
    for number in range(20):
        folder = tmp_path / str(number) / "checkpoints"
        make(folder, 5)
        (folder / "global_step_5.tmp").mkdir()
        (folder / "global_step_5.tmp" / "content").write_text("new 5")
        crash_at(number)
        try:
            retention.replace(folder, "global_step_5", folder / "global_step_5.tmp")
            finished = True
        except Crash:
            pass
        disarm(monkeypatch)
        retention.finish_interrupted(folder)
        found = contents(folder.parent)
        assert found in (
            {"checkpoints/global_step_5": "old 5"},
            {"checkpoints/global_step_5": "new 5", "checkpoints.1/global_step_5": "old 5"},
        )
        if finished:
            break
    assert finished and number >= 3 and len(found) == 2


def test_a_note_that_was_cut_off(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    make(folder, 5)
    (folder / ".set_aside.json.tmp").write_text('{"steps": [5')
    retention.finish_interrupted(folder)
    assert [path.name for path in folder.iterdir()] == ["global_step_5"]


def test_a_linked_folder_stays_on_its_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    make(disk / "mine", 5, 10)
    output = tmp_path / "output"
    output.mkdir()
    (output / "checkpoints").symlink_to(disk / "mine")
    retention.set_aside_steps(output / "checkpoints", [10])
    retention.set_aside_all(output)
    assert contents(disk).keys() == {"mine.1/global_step_10", "mine.2/global_step_5"}
    assert (output / "checkpoints").is_dir() and [path.name for path in output.iterdir()] == ["checkpoints"]


def test_a_mounted_folder_keeps_them_inside(tmp_path: Path) -> None:
    with mounted(tmp_path / "checkpoints", "size=1m") as folder:
        make(folder, 5, 10)
        retention.set_aside_steps(folder, [10])
        retention.set_aside_all(tmp_path)
        assert contents(folder).keys() == {"checkpoints.1/global_step_10", "checkpoints.2/global_step_5"}
        assert find_checkpoints(tmp_path) == []
        assert subprocess.run(["mountpoint", "-q", str(folder)], check=False).returncode == 0


def test_the_oldest_go_first_and_the_newest_never(tmp_path: Path) -> None:
    make(tmp_path, 5, 10, 100)
    retention.remove_oldest(tmp_path, None, newest=100)
    assert len(contents(tmp_path)) == 3
    retention.remove_oldest(tmp_path, 2, newest=5)
    assert contents(tmp_path).keys() == {"global_step_5", "global_step_100"}
    retention.remove_oldest(tmp_path, 1, newest=5)
    assert contents(tmp_path).keys() == {"global_step_5"}
