"""Several lines of training in one output folder: none takes, counts or deletes the checkpoints of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.fsdp2.checkpoint.manifest import steps_in
from tests.distributed.test_resume import ROW, STEPS, Workplace, ends
from tests.support.pool import RankPool
from tests.support.runs import exported, metrics, save_model, write_config, write_texts

pytestmark = pytest.mark.distributed
QUIET: dict[str, Any] = {"save_hf_weights": False}


@pytest.fixture
def place(rank_pool: RankPool, tmp_path: Path) -> Workplace:
    return Workplace(rank_pool, tmp_path, toy="llama_uneven", data="lf")


def steps(folder: Path) -> list[int]:
    return [step for step, _ in steps_in(folder)]


def origin(folder: Path) -> list[tuple[int, float]]:
    """(step, learning rate of the run that wrote it) of all checkpoints in a folder."""
    found = [(step, json.loads((path / "manifest.json").read_text())) for step, path in steps_in(folder)]
    return [(step, manifest["config"]["training"]["lr"]) for step, manifest in found]


def said(rows: list[dict[str, Any]], text: str) -> list[str]:
    return [line for line in rows[0]["log"] if text in line]


def test_a_fresh_start_in_a_used_folder(place: Workplace) -> None:
    """The new run dies early; `latest` then goes on with it, and not with the old one."""
    run = place.folder / "run"
    hf = {"save_hf_at_checkpoints": True, **QUIET}
    place.run("run", 2, max_steps=12, save_steps=4, lr=1e-3, **hf)
    assert steps(run / "checkpoints") == [4, 8, 12] == steps(run / "hf")
    rows = place.run("run", 2, max_steps=20, save_steps=1, save_total_limit=2, lr=2e-3, stop_at={0: 3}, **hf)
    assert ends(rows) == [(143, None)] * 2
    (line,) = said(rows, "set aside")
    assert "checkpoints.1" in line and "hf.1" in line
    assert origin(run / "checkpoints") == [(3, 2e-3), (4, 2e-3)] and steps(run / "hf") == [3, 4]
    assert origin(run / "checkpoints.1") == [(4, 1e-3), (8, 1e-3), (12, 1e-3)] and steps(run / "hf.1") == [4, 8, 12]
    rows = place.run("run", 2, max_steps=6, save_steps=4, lr=2e-3, resume_from_checkpoint="latest", **hf)
    assert said(rows, "Resumed from") == [f"Resumed from {run}/checkpoints/global_step_4 after step 4"]
    assert not said(rows, "set aside")


def test_a_fresh_start_that_saves_nothing(place: Workplace) -> None:
    run = place.folder / "run"
    place.run("run", 1, max_steps=2, save_steps=2, **QUIET)
    rows = place.run("run", 1, max_steps=2, **QUIET)
    assert len(said(rows, "set aside")) == 1
    assert steps(run / "checkpoints") == [] and steps(run / "checkpoints.1") == [2]


def test_back_to_an_earlier_step(place: Workplace) -> None:
    """From 6 when 9 and 12 exist: the run dies after 8, and `latest` is 8."""
    run = place.folder / "run"
    place.run("run", 2, max_steps=STEPS, save_steps=3, save_total_limit=0, lr=1e-3, **QUIET)
    back = str(run / "checkpoints" / "global_step_6")
    rows = place.run(
        "run", 2, save_steps=3, save_total_limit=3, lr=2e-3, stop_at={1: 1}, resume_from_checkpoint=back, **QUIET
    )
    assert ends(rows) == [(143, None)] * 2
    (line,) = said(rows, "set aside")
    assert line.startswith("global_step_9, global_step_12 of ")
    assert origin(run / "checkpoints.1") == [(9, 1e-3), (12, 1e-3)]
    assert origin(run / "checkpoints") == [(3, 1e-3), (6, 1e-3), (8, 2e-3)]
    assert (run / "checkpoints" / "latest").read_text() == "global_step_8\n"
    rows = place.run("run", 2, save_steps=3, lr=2e-3, resume_from_checkpoint="latest", **QUIET)
    assert said(rows, "Resumed from") == [f"Resumed from {run}/checkpoints/global_step_8 after step 8"]
    assert origin(run / "checkpoints") == [(8, 2e-3), (9, 2e-3), (12, 2e-3)]


def test_a_run_that_dies_before_it_saves_changes_nothing(place: Workplace) -> None:
    run = place.folder / "run"
    place.run("run", 2, max_steps=6, save_steps=2, **QUIET)
    back = str(run / "checkpoints" / "global_step_2")
    rows = place.run("run", 2, max_steps=6, save_steps=2, patches=("second_rank_cannot_write",), **QUIET)
    assert all(rank["code"] == 1 for rank in rows) and steps(run / "checkpoints.1") == [2, 4, 6]
    (run / "checkpoints").rmdir()
    (run / "checkpoints.1").rename(run / "checkpoints")
    rows = place.run(
        "run",
        2,
        max_steps=6,
        save_steps=2,
        patches=("second_rank_cannot_write",),
        resume_from_checkpoint=back,
        **QUIET,
    )
    assert all(rank["code"] == 1 for rank in rows)
    assert steps(run / "checkpoints") == [2, 4, 6] and not (run / "checkpoints.1").exists()


def test_from_a_checkpoint_of_another_folder(place: Workplace) -> None:
    place.run("one", 1, max_steps=4, save_steps=2, lr=1e-3, **QUIET)
    place.run("two", 1, max_steps=6, save_steps=3, lr=2e-3, **QUIET)
    source = place.folder / "one" / "checkpoints" / "global_step_2"
    rows = place.run("two", 1, max_steps=4, save_steps=1, lr=1e-3, resume_from_checkpoint=str(source), **QUIET)
    assert ends(rows) == [(0, None)] and len(said(rows, "set aside")) == 1
    assert origin(place.folder / "two" / "checkpoints") == [(3, 1e-3), (4, 1e-3)]
    assert origin(place.folder / "two" / "checkpoints.1") == [(3, 2e-3), (6, 2e-3)]
    assert steps(place.folder / "one" / "checkpoints") == [2, 4]
    # The metrics of the other run do not pass for the first steps of this one.
    assert [record["iteration"] for record in metrics(place.folder / "two")] == [3, 4]
    assert (place.folder / "two" / "metrics.1.jsonl").read_text().count("lm_loss") == 6


def test_weights_alone_of_the_own_folder(place: Workplace) -> None:
    """The run starts at step 0 with them; they stay until its first checkpoint is there."""
    run = place.folder / "run"
    options: dict[str, Any] = {"save_only_model": True, "resume_from_checkpoint": "latest", **QUIET}
    place.run("run", 1, max_steps=4, save_steps=2, lr=1e-3, **options)
    rows = place.run("run", 1, max_steps=4, save_steps=4, patches=("second_rank_cannot_write",), lr=2e-3, **options)
    assert ends(rows) == [(0, None)]  # there is no second rank
    assert origin(run / "checkpoints") == [(4, 2e-3)]
    aside = {path.name: origin(path) for path in run.glob("checkpoints.*")}
    assert aside == {"checkpoints.1": [(2, 1e-3)], "checkpoints.2": [(4, 1e-3)]}
    rows = place.run("run", 1, max_steps=3, save_steps=1, save_total_limit=0, lr=3e-3, **options)
    assert origin(run / "checkpoints") == [(1, 3e-3), (2, 3e-3), (3, 3e-3)]
    assert origin(run / "checkpoints.3") == [(4, 2e-3)]


def test_exports_are_limited_too(place: Workplace) -> None:
    rows = place.run("run", 2, max_steps=5, save_steps=1, save_total_limit=2, save_hf_at_checkpoints=True, **QUIET)
    assert ends(rows) == [(0, None)] * 2
    assert steps(place.folder / "run" / "hf") == [4, 5] == steps(place.folder / "run" / "checkpoints")


def test_a_finished_run(place: Workplace) -> None:
    """Nothing is left to train: exit code 0, and the export stays as it is; where it is missing, it is made."""
    run = place.folder / "run"
    options: dict[str, Any] = {"save_steps": 2, "resume_from_checkpoint": "latest"}
    place.run("run", 2, max_steps=4, **options)
    expected, lines = exported(run), (run / "metrics.jsonl").read_text()
    before = (run / "model.safetensors").stat().st_mtime_ns
    rows = place.run("run", 2, max_steps=4, **options)
    assert ends(rows) == [(0, None)] * 2 and rows[0]["samples"] == []
    assert len(said(rows, "Nothing left to train")) == 1
    assert (run / "model.safetensors").stat().st_mtime_ns == before
    for name in ("config.json", "model.safetensors"):
        (run / name).unlink()
    assert ends(place.run("run", 2, max_steps=4, **options)) == [(0, None)] * 2
    found = exported(run)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert (run / "metrics.jsonl").read_text() == lines
    rows = place.run("run", 2, max_steps=3, **options)
    assert all(rank["code"] == 2 and "training.max_steps = 3 lies before" in rank["error"] for rank in rows)
    # The export of a later step is not that of the checkpoint which is asked for.
    place.run("run", 2, max_steps=6, **options)
    name = next(iter(expected))
    assert not torch.equal(exported(run)[name], expected[name])
    back = {**options, "resume_from_checkpoint": str(run / "checkpoints" / "global_step_4")}
    assert ends(place.run("run", 2, max_steps=4, **back)) == [(0, None)] * 2
    found = exported(run)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_other_settings_and_other_data(place: Workplace) -> None:
    options: dict[str, Any] = {"save_steps": 2, "resume_from_checkpoint": "latest", **QUIET}
    place.run("run", 2, max_steps=2, **options)
    rows = place.run("run", 2, max_steps=4, lr=5e-4, **options)
    (line,) = said(rows, "settings that differ")
    assert "training.max_steps 2 -> 4" in line and "training.lr 0.001 -> 0.0005" in line
    assert "output_dir" not in line and "save_steps" not in line
    assert not [text for text in rows[1]["log"] if "settings that differ" in text]
    place.data["data_manager_type"] = "mg"
    rows = place.run("run", 2, max_steps=6, **options)
    assert all(rank["code"] == 2 and "data.data_manager_type = mg" in rank["error"] for rank in rows)
    place.data["data_manager_type"] = "lf"
    write_texts(place.folder / "data.jsonl", 70)
    rows = place.run("run", 2, max_steps=6, **options)
    assert all(rank["code"] == 2 and "an epoch has" in rank["error"] for rank in rows)
    assert steps(place.folder / "run" / "checkpoints") == [2, 4]


def test_a_checkpoint_of_another_model(place: Workplace) -> None:
    options: dict[str, Any] = {"save_steps": 2, "resume_from_checkpoint": "latest", **QUIET}
    place.run("run", 2, max_steps=2, **options)
    place.model = save_model(place.folder / "other", "llama")
    rows = place.run("run", 2, max_steps=4, **options)
    for rank in rows:
        assert rank["code"] == 2 and "belongs to another model" in rank["error"] and "amaged" not in rank["error"]
        assert "training.output_dir" in rank["error"]


def test_a_run_is_told_at_its_end_what_could_not_be_saved(place: Workplace) -> None:
    rows = place.run(
        "run", 2, patches=("second_rank_cannot_write",), max_steps=4, save_steps=2, save_error="continue", **QUIET
    )
    assert ends(rows) == [(0, None)] * 2
    assert said(rows, "could not be written") == ["2 checkpoints could not be written; there is none"]
    place.run("run", 2, max_steps=2, save_steps=2, **QUIET)
    rows = place.run(
        "run",
        2,
        patches=("second_rank_cannot_write",),
        max_steps=4,
        save_steps=4,
        save_error="continue",
        resume_from_checkpoint="latest",
        **QUIET,
    )
    newest = place.folder / "run" / "checkpoints" / "global_step_2"
    assert said(rows, "could not be written") == [
        f"1 checkpoint could not be written; the newest whole one is {newest}"
    ]


@pytest.mark.parametrize("options", [[], ["--check"]], ids=["training", "check"])
def test_a_wrong_checkpoint_is_answered_before_anything_is_made(place: Workplace, options: list[str]) -> None:
    config = write_config(place.folder / "run", place.model, place.data, stage="pt", max_steps=2)
    wrong = ["--training.resume_from_checkpoint", "Latest", *options]
    (row,) = place.pool.run(ROW, ranks=1, argv=[config, *wrong])
    assert row["code"] == 2 and "did you mean latest?" in row["error"]
    assert not (place.folder / "run").exists()
    (row,) = place.pool.run(ROW, ranks=1, argv=[config, "--training.save_total_limit", "-1", *options])
    assert row["code"] == 2 and "training.save_total_limit" in row["error"]
