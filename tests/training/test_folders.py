"""What `--load` names."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.training.folders import check_folders, hf_directory


def args_of(load: Path | None, *, convert: bool = False, **written: Path) -> Namespace:
    folders = dict.fromkeys(("save", "metrics_dir", "tensorboard_dir", "data_cache_path", "hf_save_dir"))
    folders |= {name: str(path) for name, path in written.items()}
    named = None if load is None else str(load)
    return Namespace(load=named, lora_load=None, save_lora_to_hf=False, enable_hf2mg_convert=convert, **folders)


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


@pytest.mark.parametrize("name", ["save", "metrics_dir", "tensorboard_dir", "data_cache_path", "hf_save_dir"])
def test_what_is_written_to(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    flag = f"--{name.replace('_', '-')}"
    check_folders(args_of(None, **{name: tmp_path / "new" / "folder"}))
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=rf"{flag} {folder} cannot be written: {tmp_path}/file is a file; name"):
            check_folders(args_of(None, **{name: folder}))
    assert not (tmp_path / "new").exists()


def test_a_load_folder_that_is_missing(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    check_folders(args_of(missing, save=missing))
    check_folders(args_of(missing, save=tmp_path / "." / "missing"))
    with pytest.raises(UserError, match=f"--load {missing}: there is no such folder; leave --load out"):
        check_folders(args_of(missing, save=tmp_path))
    missing.touch()
    with pytest.raises(UserError, match=f"--load {missing} is a file"):
        check_folders(args_of(missing))
