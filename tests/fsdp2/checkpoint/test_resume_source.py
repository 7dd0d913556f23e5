"""Wrong values of `training.resume_from_checkpoint` are answered at once, with what is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.resume_source import check_resume
from mindspeed_llm.fsdp2.config.training_config import TrainingConfig
from tests.fsdp2.checkpoint.test_listing import make

LATEST = "for the newest of training.output_dir write latest"
THERE = "checkpoints: global_step_5, global_step_20"
# value (a path is below the output folder), parts of the message
WRONG: list[tuple[str, list[str]]] = [
    ("", ["is empty"]),
    ("  ", ["is empty"]),
    ("Latest", ["did you mean latest?"]),
    ("true", ["did you mean latest?"]),
    ("{}/checkpoints/global_step_15", ["does not exist", THERE]),
    ("{}/nowhere", ["does not exist", THERE]),
    ("{}", ["is no checkpoint but holds some", THERE, LATEST]),
    ("{}/checkpoints", ["is no checkpoint but holds some", THERE, LATEST]),
    ("{}/checkpoints/global_step_20/manifest.json", ["is a file", THERE]),
    ("{}/checkpoints/latest", ["is a file", THERE]),
    ("{}/checkpoints/global_step_30.tmp", ["was never finished", THERE]),
    ("{}/checkpoints/global_step_20/extra_state", ["is no checkpoint: it has no manifest.json"]),
    ("{}/model", ["is a model directory", "model.model_name_or_path"]),
]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    output = tmp_path / "output"
    for step in (5, 20):
        make(output, step)
    (output / "checkpoints" / "latest").write_text("global_step_20\n")
    (output / "checkpoints" / "global_step_30.tmp").mkdir()
    (output / "model").mkdir()
    (output / "model" / "config.json").write_text("{}")
    return output


@pytest.mark.parametrize(("value", "parts"), WRONG, ids=[value or "empty" for value, _ in WRONG])
def test_wrong_values(output: Path, value: str, parts: list[str]) -> None:
    value = value.format(output)
    with pytest.raises(UserError) as error:
        check_resume(TrainingConfig(output_dir=str(output), resume_from_checkpoint=value))
    text = str(error.value)
    assert text.startswith(f"training.resume_from_checkpoint = {value!r} ")
    assert [part for part in [*parts, "expected latest, or the directory"] if part not in text] == [], text


def test_the_folder_of_another_run_is_not_latest(output: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds some \(in .*output/checkpoints: global_step_5, global_step_20\); ex"):
        check_resume(TrainingConfig(output_dir=str(tmp_path / "other"), resume_from_checkpoint=str(output)))


@pytest.mark.parametrize("value", [None, "latest", "{}/checkpoints/global_step_5"])
def test_right_values(output: Path, value: str | None) -> None:
    check_resume(TrainingConfig(output_dir=str(output), resume_from_checkpoint=value and value.format(output)))


# folder that is a file, further fields, whether it stands in the way
FILES: list[tuple[str, dict[str, object], bool]] = [
    ("checkpoints", {}, True),
    ("checkpoints", {"save_steps": 0, "save_epochs": 0}, False),
    ("checkpoints", {"save_steps": 0, "save_epochs": 0, "resume_from_checkpoint": "latest"}, True),
    ("hf", {"save_hf_at_checkpoints": True}, True),
    ("hf", {}, False),
]


@pytest.mark.parametrize(("name", "fields", "refused"), FILES)
def test_a_file_in_place_of_a_folder(tmp_path: Path, name: str, fields: dict[str, object], refused: bool) -> None:
    (tmp_path / name).write_text("")
    check: Callable[[], None] = lambda: check_resume(TrainingConfig(output_dir=str(tmp_path), **fields))  # noqa: E731
    if refused:
        with pytest.raises(UserError, match=f"training.output_dir: {tmp_path / name} is a file"):
            check()
    else:
        check()
