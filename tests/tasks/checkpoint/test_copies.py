"""Tensors that Megatron holds once and files on the hub twice: what the second one holds is not lost in silence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.tasks.checkpoint import toys

NAME = "model.layers.4.shared_head.head.weight"


def with_head(folder: Path, *, change: bool) -> Path:
    """A toy of DeepSeek-V3 whose MTP layer has its own output layer: a copy, or not quite."""
    source = toys.toy(folder, "deepseek3")
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors[NAME] = tensors["lm_head.weight"].clone()
    if change:
        tensors[NAME][-1, -1] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    return source


@pytest.mark.parametrize("verify", ["sample", "full"])
@pytest.mark.parametrize("change", [False, True])
def test_a_copy_that_is_none_is_named(change: bool, verify: str, tmp_path: Path) -> None:
    source = with_head(tmp_path / "hf", change=change)
    dropped = toys.run(source, tmp_path / "mg", "--mtp-num-layers", "1", "--verify", verify).plan.dropped
    report = json.loads((tmp_path / "mg" / "conversion_report.json").read_text())
    assert report["source"]["dropped"][NAME] == dropped[NAME]
    assert dropped[NAME].startswith("differs from lm_head.weight" if change else "a copy of lm_head.weight")


def test_config_says_how_many_mtp_layers_are_left(tmp_path: Path) -> None:
    source = with_head(tmp_path / "hf", change=False)
    toys.run(source, tmp_path / "mg")
    toys.run(tmp_path / "mg", tmp_path / "back", "--hf-cfg-dir", str(source), of="mg", to="hf")
    assert json.loads((source / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0
