"""FSDP2 command lines that users type today, at full size: they pass the checks, or say why not."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config import Config, check_config, parse_command_line
from mindspeed_llm.fsdp2.config.checks import value_of

HERE = Path(__file__).parent
COMMANDS = yaml.safe_load((HERE / "fsdp2" / "commands.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def workplace(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the examples and command files of the repository and the model directories that they name."""
    shutil.copytree(repository / "examples" / "fsdp2", tmp_path / "examples" / "fsdp2")
    shutil.copytree(HERE / "fsdp2", tmp_path / "tests" / "commands" / "fsdp2")
    for name in ("qwen3_hf", "qwen3-1.7b_hf", "qwen3-14b_hf", "qwen3-32b_hf"):
        folder = tmp_path / "model_from_hf" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 40960}))
        (folder / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_checks(argv: str, ranks: int) -> Config:
    config = parse_command_line(shlex.split(argv)).config
    check_config(config, world_size=ranks)
    return config


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("command", COMMANDS, ids=[command["name"] for command in COMMANDS])
def test_command(command: dict[str, Any]) -> None:
    if "refused" in command:
        with pytest.raises(UserError) as error:
            run_checks(command["argv"], command["ranks"])
        assert [part for part in command["refused"] if part not in str(error.value)] == []
        return
    config = run_checks(command["argv"], command["ranks"])
    assert {key: value_of(config, key) for key in command["fields"]} == command["fields"]
