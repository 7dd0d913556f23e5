"""Which iterations end up in a profile: read from the trace that torch's profiler writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mindspeed_llm.training.profiler import profiler_of
from tests.features_manager.command import arguments


def _recorded(folder: Path) -> list[int]:
    """The iterations whose marks the trace of rank 0 holds."""
    events = json.loads((folder / "rank0.pt.trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    return sorted(int(name.removeprefix("iteration ")) for name in names if name.startswith("iteration "))


def _run(folder: Path, flags: str, *, first: int, last: int = 8) -> None:
    args = arguments(f"--profile --profile-save-path {folder} {flags}")
    with profiler_of(args, first) as profiler:
        for iteration in range(first, last):
            with torch.profiler.record_function(f"iteration {iteration}"):
                torch.ones(3) + 1
            profiler.step()


@pytest.mark.parametrize(
    ("flags", "first", "expected"),
    [
        ("--profile-step-start 2 --profile-step-end 4", 0, [2, 3]),
        ("--profile-step-start 0 --profile-step-end 1", 0, [0]),
        ("--profile-step-start 5 --profile-step-end -1", 0, [5, 6, 7]),
        # Resumed before, within: iterations count over the whole training.
        ("--profile-step-start 5 --profile-step-end 7", 3, [5, 6]),
        ("--profile-step-start 2 --profile-step-end 5", 4, [4]),
        ("--profile-step-start 2 --profile-step-end -1", 6, [6, 7]),
    ],
)
def test_the_iterations_that_the_flags_say_are_recorded(
    tmp_path: Path, flags: str, first: int, expected: list[int]
) -> None:
    _run(tmp_path, flags, first=first)
    assert _recorded(tmp_path) == expected


@pytest.mark.parametrize("flags", ["--profile-step-start 2 --profile-step-end 4", "--profile-ranks 1 --check 2"])
def test_nothing_is_written_behind_the_end_or_by_other_ranks(tmp_path: Path, flags: str) -> None:
    ranks = 2 if "ranks" in flags else 1
    args = arguments(f"--profile --profile-save-path {tmp_path / 'profile'} {flags}", world_size=ranks)
    with profiler_of(args, 4) as profiler:
        profiler.step()
    assert not (tmp_path / "profile").exists()


def test_details_reach_the_profiler(tmp_path: Path) -> None:
    _run(tmp_path, "--profile-step-start 1 --profile-step-end 2 --profile-export-type db", first=0)
    assert (tmp_path / "rank0.db").exists()
