"""Weights that do not belong to the model of a run are refused; what they do not tell is warned about."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.pool import RankPool, RowFailed
from tests.tasks.models.topologies import EP2, PP2, TP2

pytestmark = pytest.mark.distributed
Family = Callable[[str], Path]
ROW = "tests.tasks.models.rows:load_with"


def load(
    rank_pool: RankPool, folder: Path, *, ranks: int = 1, split: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """What loading says in a run whose arguments are changed after the structure is read."""
    return rank_pool.run(ROW, ranks=ranks, folder=str(folder), split=split or {}, changes=changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama2",
            {"num_layers": 3},
            "says 4 for --num-layers, the run has 3; check the flags that describe the model",
        ),
        ("llama2", {"ffn_hidden_size": 96}, "says 88 for --ffn-hidden-size, the run has 96"),
        ("llama2", {"swiglu": False}, "says True for --swiglu, the run has False"),
        ("llama2", {"normalization": "LayerNorm"}, "says RMSNorm for --normalization, the run has LayerNorm"),
        ("llama2", {"untie_embeddings_and_output_weights": False}, "--untie-embeddings-and-output-weights"),
        ("llama2", {"rotary_percent": 0.5}, "says 1.0 for --rotary-percent, the run has 0.5"),
        ("qwen25", {"add_qkv_bias": False}, "says True for --add-qkv-bias, the run has False"),
        ("qwen3", {"qk_layernorm": False}, "says True for --qk-layernorm, the run has False"),
        ("qwen2-moe", {"moe_layer_freq": 1}, r"says \(1, 0, 1, 1\) for --moe-layer-freq, the run has \(1, 1, 1, 1\)"),
        ("qwen2-moe", {"shared_expert_gate": False}, "says True for --shared-expert-gate, the run has False"),
    ],
)
def test_weights_of_another_model_are_refused(
    rank_pool: RankPool, family: Family, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RowFailed, match=message) as caught:
        load(rank_pool, family(name), **changes)
    assert {kind for _, kind, _, _ in caught.value.errors} == {"UserError"}


def test_a_model_with_more_than_the_weights_have_is_refused(rank_pool: RankPool, family: Family) -> None:
    with pytest.raises(
        RowFailed, match=r"has nothing for decoder\.layers\.0\.self_attention\.k_layernorm\.weight and 7 more"
    ):
        load(rank_pool, family("llama2"), qk_layernorm=True)


def test_other_settings_are_warned_about_and_hold(rank_pool: RankPool, family: Family) -> None:
    changes = {"rotary_base": 777.0, "norm_epsilon": 1e-3, "init_method_std": 0.5, "max_position_embeddings": 512}
    found = load(rank_pool, family("llama2"), ranks=2, split=TP2, **changes)
    # Once, not by every rank; and not about what the weights do not depend on.
    assert [len(of_rank["warnings"]) for of_rank in found] == [1, 0]
    [warning] = found[0]["warnings"]
    assert warning.startswith("the run goes on from the weights of ")
    assert warning.endswith(
        "with other settings: --norm-epsilon 0.001 (config.json: 1e-06), --rotary-base 777.0 (config.json: 10000.0)"
    )
    assert [of_rank["warnings"] for of_rank in load(rank_pool, family("llama2"))] == [[]]


def test_a_directory_that_lacks_a_tensor_is_refused(rank_pool: RankPool, family: Family, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(family("llama2") / "config.json", folder)
    tensors = load_file(family("llama2") / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RowFailed, match=r"the source has no tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        load(rank_pool, folder, ranks=2, split=PP2)


def test_a_directory_that_is_none_is_refused(rank_pool: RankPool, family: Family, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(RowFailed, match=r"(?i)gpt2"):
        rank_pool.run(ROW, ranks=1, folder=str(family("llama2")), split={}, changes={}, weights=str(tmp_path))


def test_each_rank_reads_its_own_experts_only(rank_pool: RankPool, family: Family) -> None:
    """The bytes of routed experts that ranks read add up to those of the file, without expert parallelism each reads
    all.
    """
    split = EP2 | {"moe_grouped_gemm": True}
    shared = [of_rank["expert_bytes"] for of_rank in load(rank_pool, family("mixtral"), ranks=2, split=split)]
    alone = [of_rank["expert_bytes"] for of_rank in load(rank_pool, family("mixtral"))]
    size = sum(
        tensor.nbytes
        for name, tensor in load_file(family("mixtral") / "model.safetensors").items()
        if "experts" in name
    )
    assert alone == [size]
    assert shared == [size // 2, size // 2]


def test_weights_take_the_dtype_of_the_parameters(rank_pool: RankPool, family: Family) -> None:
    [found] = load(rank_pool, family("qwen3"), split={"bf16": True})
    assert found["dtypes"] == {"torch.bfloat16"}
    expected = load_file(family("qwen3") / "model.safetensors")["model.embed_tokens.weight"].to(torch.bfloat16)
    assert torch.equal(torch.from_numpy(found["embedding"])[:509], expected.float())
