"""Fixtures of the configuration tests: a model directory, a YAML writer, and a configuration that passes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.fsdp2.config import Config, DataConfig, ModelConfig, TrainingConfig


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model directory as far as the checks look into it: config.json and one (empty) weight file."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 40960}))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def write_yaml(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """Writes a text or bytes to `config.yaml` and returns its path."""

    def write(content: str | bytes) -> Path:
        path = tmp_path / "config.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.fixture
def make_config(model_dir: Path, tmp_path: Path) -> Callable[..., Config]:
    """Builds a configuration that passes all checks, with fields replaced as in `{"training.lr": 1.0}`."""

    def make(changes: dict[str, Any] | None = None) -> Config:
        config = Config(
            model=ModelConfig(model_name_or_path=str(model_dir)),
            data=DataConfig(dataset={"file_name": "data.jsonl"}),
            training=TrainingConfig(output_dir=str(tmp_path / "output")),
        )
        for key, value in (changes or {}).items():
            section, name = key.split(".")
            changed = dataclasses.replace(getattr(config, section), **{name: value})
            config = dataclasses.replace(config, **{section: changed})
        return config

    return make
