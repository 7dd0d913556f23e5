"""Folders that a run can write to, and those that it must not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config import Config, check_config

MakeConfig = Callable[..., Config]


def test_output_dir_that_is_a_file_or_below_one(make_config: MakeConfig, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(UserError, match=r"training\.output_dir = .* cannot be written: .*file is a file"):
            check_config(make_config({"training.output_dir": str(path)}), world_size=1)


def test_output_dir_without_permission(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests may run as root, whom no permission stops.
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(UserError, match=r"training\.output_dir = .* cannot be written"):
        check_config(make_config(), world_size=1)


@pytest.mark.parametrize("model", [None, "org/name"])
def test_output_dir_may_exist(make_config: MakeConfig, tmp_path: Path, model: str | None) -> None:
    (tmp_path / "output").mkdir()
    check_config(make_config({} if model is None else {"model.model_name_or_path": model}), world_size=1)


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "model.safetensors").touch()
    return folder


def write_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (folder / "adapter_model.safetensors").touch()
    return folder


STARTS_FROM = [
    ("model.model_name_or_path", write_model, {}),
    ("training.ref_model", write_model, {"training.stage": "dpo"}),
    ("model.adapter_name_or_path", write_adapter, {}),
]


@pytest.mark.parametrize(("key", "write", "changes"), STARTS_FROM)
def test_output_dir_that_holds_what_the_run_starts_from(
    make_config: MakeConfig, tmp_path: Path, key: str, write: Callable[[Path], Path], changes: dict[str, Any]
) -> None:
    source = write(tmp_path / "source")
    config = make_config({**changes, key: str(source), "training.output_dir": f"{source}/../source"})
    with pytest.raises(UserError, match=f"^training.output_dir and {key} are the same folder"):
        check_config(config, world_size=1)
    # An earlier run's exports at its checkpoints, which a new one in the same folder sets aside.
    output = tmp_path / "run"
    source = write(output / "hf" / "global_step_5")
    config = make_config({**changes, key: str(source), "training.output_dir": str(output)})
    with pytest.raises(UserError, match=rf"^{key} = .*global_step_5' is an export in training\.output_dir"):
        check_config(config, world_size=1)
    source = write(tmp_path / "all" / "hf" / "llama")
    check_config(make_config({**changes, key: str(source), "training.output_dir": str(tmp_path / "all")}), world_size=1)


def test_output_dir_with_the_merged_model_that_the_run_starts_from(make_config: MakeConfig, tmp_path: Path) -> None:
    output = tmp_path / "run"
    merged = write_model(output / "merged")
    changes = {"model.model_name_or_path": str(merged), "training.output_dir": str(output)}
    check_config(make_config(changes), world_size=1)
    with pytest.raises(UserError, match=r"^model\.model_name_or_path = .*merged' is an export in training\.output_dir"):
        check_config(make_config({**changes, "model.lora_rank": 4, "training.merge_adapter": True}), world_size=1)
    (output / "adapter_config.json").touch()
    with pytest.raises(UserError, match=r"merged' is an export in training\.output_dir"):
        check_config(make_config(changes), world_size=1)
