"""Ranks that hold the same tensor must agree on it; ranks that share one must have it in one dtype."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mindspeed_llm.errors import UserError
from tests.tasks.checkpoint import toys
from tests.tasks.checkpoint.test_mg_contradictions import State, change

TP, PP = ("--target-tensor-parallel-size", "2"), ("--target-pipeline-parallel-size", "2")
EP = ("--target-expert-parallel-size", "2")


def plus_one(*words: str) -> Callable[[State], None]:
    """Changes the tensors of which the key has one of these words."""

    def do(content: State) -> None:
        keys = [key for key in content["model"] if any(word in key for word in words)]
        assert keys
        for key in keys:
            content["model"][key] = content["model"][key] + 1

    return do


# family and changes of its config.json, split, the changed file, key
APART = {
    "norms on tensor parallel ranks": ("qwen3", {}, TP, "mp_rank_01", "layers.2.input_layernorm"),
    "a tied embedding on both ends": (
        "qwen3",
        {"tie_word_embeddings": True},
        PP,
        "mp_rank_00_001",
        "output_layer.weight",
    ),
    "attention on expert parallel ranks": ("qwen3-moe", {}, EP, "mp_rank_00_001", "layers.1.self_attention.linear_qkv"),
    "routers on tensor parallel ranks": ("qwen3-moe", {}, TP, "mp_rank_01", "layers.3.mlp.router"),
}


@pytest.mark.parametrize("verify", ["full", "sample"])
@pytest.mark.parametrize("to", ["hf", "mg"])
@pytest.mark.parametrize("name", APART)
def test_replicas_that_differ(name: str, to: str, verify: str, tmp_path: Path) -> None:
    family, changes, split, file, key = APART[name]
    toys.run(toys.toy(tmp_path / "hf", family, **changes), tmp_path / "mg", *split)
    change(tmp_path / "mg", plus_one(key), file)
    for path in (tmp_path / "mg").glob("conversion_report.json"):
        path.unlink()  # its checksums would tell, too
    with pytest.raises(UserError, match=rf"mp_rank_00.* and .*{file}/.*{key}.* hold different values"):
        toys.run(tmp_path / "mg", tmp_path / "out", "--verify", verify, of="mg", to=to)
    assert not (tmp_path / "out").exists()
    toys.run(tmp_path / "mg", tmp_path / "out", "--verify", "none", of="mg", to=to)


def test_one_value_that_differs_shows_in_full(tmp_path: Path) -> None:
    toys.run(toys.toy(tmp_path / "hf", "qwen3", tie_word_embeddings=True), tmp_path / "mg", *PP)

    def one(content: State) -> None:
        content["model"]["output_layer.weight"][511, 47] = 3.0

    change(tmp_path / "mg", one, "mp_rank_00_001")
    (tmp_path / "mg" / "conversion_report.json").unlink()
    with pytest.raises(UserError, match=r"hold different values of model\.embed_tokens\.weight"):
        toys.run(tmp_path / "mg", tmp_path / "out", "--verify", "full", of="mg", to="hf")


def _wide(content: State) -> None:
    content["model"] = {key: value.float() + 2.0**-20 for key, value in content["model"].items()}


@pytest.mark.parametrize("file", ["mp_rank_00", "mp_rank_01"])
def test_ranks_of_several_dtypes(file: str, tmp_path: Path) -> None:
    toys.run(toys.toy(tmp_path / "hf", "qwen3"), tmp_path / "mg", *TP)
    change(tmp_path / "mg", _wide, file)
    with pytest.raises(UserError, match=r"one tensor made of several dtypes: mp_rank_00/.*, mp_rank_01/.*params-dtype"):
        toys.run(tmp_path / "mg", tmp_path / "out", of="mg", to="hf")
    toys.run(tmp_path / "mg", tmp_path / "out", "--params-dtype", "bf16", of="mg", to="hf")
    assert {value.dtype for value in toys.read_hf(tmp_path / "out").values()} == {torch.bfloat16}


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_config_says_the_dtype_that_is_written(key: str, tmp_path: Path) -> None:
    """Whatever the config.json in --hf-cfg-dir says, which may be of weights in another dtype."""
    source = toys.toy(tmp_path / "hf", "qwen3", **{key: "bfloat16"})
    toys.run(source, tmp_path / "mg", "--params-dtype", "fp32")
    toys.run(tmp_path / "mg", tmp_path / "back", "--hf-cfg-dir", str(source), of="mg", to="hf")
    assert {value.dtype for value in toys.read_hf(tmp_path / "back").values()} == {torch.float32}
    assert json.loads((tmp_path / "back" / "config.json").read_text())[key] == "float32"


def test_fewer_layers_than_dense_ones(tmp_path: Path) -> None:
    """The first of two dense layers, without any with experts."""
    source = toys.toy(tmp_path / "hf", "deepseek3", first_k_dense_replace=2, num_nextn_predict_layers=0)
    toys.run(source, tmp_path / "mg", "--num-layers", "1", "--verify", "full")
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    before, after = toys.read_hf(source), toys.read_hf(tmp_path / "back")
    assert {name for name in before if not name.startswith("model.layers.") or ".layers.0." in name} == set(after)
    assert all(torch.equal(before[name], after[name]) for name in after)
