"""Profiles: which steps are in the files, and that each option changes what is in them."""

from __future__ import annotations

import json
import logging
import sqlite3
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.platform import profiler_backends
from mindspeed_llm.platform.profiling import Profiler

pytestmark = pytest.mark.filterwarnings("ignore:Profiler won't be using warmup:UserWarning")


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_DEVICE", "cpu")


def _run(folder: Path, *, steps: int, rank: int = 0, **fields: Any) -> None:
    """Train `steps` steps; step k multiplies matrices of k + 2 rows, so that a trace tells its steps."""
    fields = {"enabled": True, "record_shapes": True, "save_path": str(folder)} | fields
    with Profiler(rank=rank, **fields) as profiler:
        for step in range(steps):
            torch.ones(step + 2, 4) @ torch.ones(4, 4)
            profiler.step()


def _trace(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return json.loads((folder / f"rank{rank}.pt.trace.json").read_text())["traceEvents"]


def _recorded_steps(folder: Path) -> list[int]:
    events = [event for event in _trace(folder) if event["name"] == "aten::mm"]
    return sorted(event["args"]["Input Dims"][0][0] - 2 for event in events)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, -1, [0, 1, 2, 3, 4, 5]), (0, 1, [0]), (1, 3, [1, 2]), (4, 5, [4]), (3, -1, [3, 4, 5]), (4, 99, [4, 5])],
)
def test_the_steps_from_start_to_before_end_are_recorded(
    start: int, end: int, expected: list[int], tmp_path: Path
) -> None:
    _run(tmp_path, steps=6, step_start=start, step_end=end)
    assert _recorded_steps(tmp_path) == expected


@pytest.mark.parametrize("steps", [1, 3])
def test_a_window_after_the_last_step_is_reported(
    steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("mindspeed_llm"), "propagate", True)
    _run(tmp_path, steps=steps, step_start=3, step_end=5)
    assert f"no step was profiled: profile_step_start is 3, but this process did only {steps} steps" in caplog.text


@pytest.mark.parametrize(("ranks", "written"), [([-1], True), ([1, 3], True), ([0], False)])
def test_only_the_chosen_ranks_are_profiled(ranks: list[int], written: bool, tmp_path: Path) -> None:
    _run(tmp_path, steps=1, rank=3, ranks=ranks)
    assert (tmp_path / "rank3.pt.trace.json").exists() == written


def test_off_means_off(tmp_path: Path) -> None:
    _run(tmp_path / "none", steps=1, enabled=False)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("start", "end"), [(3, 3), (3, 2), (-1, 2)])
def test_an_empty_range_is_refused(start: int, end: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"profile_step_start={start}, profile_step_end={end}"):
        _run(tmp_path, steps=1, step_start=start, step_end=end)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("level", "level9", "level_none, level0"), ("export_type", "xml", "text, db")],
)
def test_unknown_values_are_refused(field: str, value: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        _run(tmp_path, steps=1, **{field: value})


def test_the_options_decide_what_a_trace_holds(tmp_path: Path) -> None:
    _run(tmp_path / "bare", steps=1, record_shapes=False, data_simplification=True)
    _run(tmp_path / "full", steps=1, with_memory=True, with_stack=True, level="level1")
    bare, full = _trace(tmp_path / "bare"), _trace(tmp_path / "full")

    def products(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [event["args"] for event in events if event["name"] == "aten::mm"]

    assert not any("Input Dims" in arguments for arguments in products(bare))
    assert all("Input Dims" in arguments for arguments in products(full))
    assert not any(event["name"] == "[memory]" for event in bare)
    assert any(event["name"] == "[memory]" for event in full)
    assert not any(event.get("cat") == "python_function" for event in bare)
    assert any(event.get("cat") == "python_function" for event in full)
    assert not (tmp_path / "bare" / "rank0.operators.txt").exists()
    assert "aten::mm" in (tmp_path / "full" / "rank0.operators.txt").read_text()


@pytest.mark.parametrize(("level", "flops"), [("level0", 0), ("level1", 2 * 2 * 4 * 4)])
def test_a_database_holds_events_and_operators(level: str, flops: int, tmp_path: Path) -> None:
    for _ in range(2):  # the second run replaces the file of the first
        _run(tmp_path, steps=1, export_type="db", level=level)
    connection = sqlite3.connect(tmp_path / "rank0.db")
    assert connection.execute("SELECT device, input_shapes, flops FROM events WHERE name = 'aten::mm'").fetchall() == [
        ("cpu", "[[2, 4], [4, 4]]", flops)
    ]
    assert connection.execute("SELECT calls FROM operators WHERE name = 'aten::mm'").fetchall() == [(1,)]
    connection.close()
    _run(tmp_path, steps=1, export_type="db", data_simplification=True)
    connection = sqlite3.connect(tmp_path / "rank0.db")
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    connection.close()
    assert tables == [("events",)]


def test_the_ascend_profiler_gets_every_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch_npu's profiler is constructed with (its argument names are checked in test_npu_calls)."""

    def record(name: str):
        return lambda *args, **keywords: (name, args, keywords)

    fake = types.SimpleNamespace(
        profile=record("profile"),
        schedule=record("schedule"),
        tensorboard_trace_handler=record("handler"),
        _ExperimentalConfig=record("config"),
        ProfilerActivity=types.SimpleNamespace(CPU="CPU", NPU="NPU"),
        ProfilerLevel=types.SimpleNamespace(Level_none="none", Level0="0", Level1="1", Level2="2"),
        ExportType=types.SimpleNamespace(Text="Text", Db="Db"),
    )
    stub = types.ModuleType("torch_npu")
    stub.profiler = fake
    monkeypatch.setitem(sys.modules, "torch_npu", stub)
    monkeypatch.setattr(profiler_backends, "device_type", lambda: "npu")
    name, _, keywords = profiler_backends.make_profiler(
        skip_first=4,
        warmup=1,
        active=1,
        level="level1",
        export_type="db",
        data_simplification=False,
        with_cpu=True,
        with_stack=False,
        with_memory=True,
        record_shapes=True,
        save_path=tmp_path,
        rank=6,
    )
    assert name == "profile"
    assert keywords == {
        "activities": ["NPU", "CPU"],
        "schedule": ("schedule", (), {"wait": 0, "active": 1, "warmup": 1, "repeat": 1, "skip_first": 4}),
        "on_trace_ready": ("handler", (str(tmp_path),), {"worker_name": "rank6"}),
        "experimental_config": (
            "config",
            (),
            {"profiler_level": "1", "data_simplification": False, "export_type": "Db"},
        ),
        "with_stack": False,
        "profile_memory": True,
        "record_shapes": True,
    }
