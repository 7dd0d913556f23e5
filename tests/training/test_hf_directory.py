"""What `--load` names."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.training.hf_directory import hf_directory


def args_of(folder: Path | None, *, convert: bool = False) -> Namespace:
    return Namespace(load=None if folder is None else str(folder), enable_hf2mg_convert=convert)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("convert", [False, True])
def test_a_model_directory(tmp_path: Path, name: str, convert: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).touch()
    assert hf_directory(args_of(tmp_path, convert=convert)) == tmp_path


def test_checkpoints_and_folders_to_come(tmp_path: Path) -> None:
    assert hf_directory(args_of(None)) is None
    assert hf_directory(args_of(tmp_path / "none")) is None
    (tmp_path / "iter_0000003").mkdir()
    # A copy of the model's configuration beside checkpoints makes no model directory.
    (tmp_path / "config.json").write_text("{}")
    assert hf_directory(args_of(tmp_path)) is None


def test_a_configuration_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has a config.json, but neither weights \(\*.safetensors or .*nor a checkpoi"):
        hf_directory(args_of(tmp_path))


def test_converting_what_is_no_model_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--enable-hf2mg-convert expects .* but there is no config.json; name"):
        hf_directory(args_of(tmp_path, convert=True))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"there is no weights|no weights \(\*.safetensors"):
        hf_directory(args_of(tmp_path, convert=True))
