"""Numbers of parameters, against transformers and against arithmetic by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mindspeed_llm.training.arguments.parameters import active_per_token, model_of, stages_of, whole_model
from mindspeed_llm.training.arguments.validate import validate
from tests.support.toys import TOYS
from tests.training.arguments.lines import DENSE, EXPERTS, arguments
from tests.training.arguments.test_model_from_hf import from_hf, save_config

FULL_SIZE: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "toy": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "llama3-8b": {
        "toy": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "mixtral-8x7b": {
        "toy": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "head_dim": 128,
    },
}


def of_transformers(toy: str, **changes: Any) -> int:
    """The number of parameters of the model in transformers; tied ones once."""
    fields = {**TOYS[toy], **changes}
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("toy", ["llama", "llama_tied", "qwen3", "qwen3_moe", "mixtral"])
def test_toys_have_as_many_as_in_transformers(tmp_path: Path, toy: str) -> None:
    args, _ = from_hf(save_config(tmp_path, toy))
    assert whole_model(model_of(validate(args, 1))) == of_transformers(toy)


@pytest.mark.parametrize("name", FULL_SIZE)
def test_full_sizes_have_as_many_as_in_transformers(tmp_path: Path, name: str) -> None:
    changes = dict(FULL_SIZE[name])
    toy = changes.pop("toy")
    args, _ = from_hf(save_config(tmp_path, toy, **changes))
    assert whole_model(model_of(validate(args, 1))) == of_transformers(toy, **changes)


def test_biases(tmp_path: Path) -> None:
    biases = {"attention_bias": True, "mlp_bias": True}
    args, _ = from_hf(save_config(tmp_path, "llama", **biases))
    assert whole_model(model_of(validate(args, 1))) == of_transformers("llama", **biases)


# By hand: a layer of the dense line has norms 2 x 48; query, key, value (6 + 2 + 2) x 16 x 48; projection 48 x 96;
# gate, up and down 3 x 88 x 48.
_NORMS = 2 * 48
_ATTENTION = 160 * 48 + 48 * 96
_MLP = 3 * 88 * 48
_LAYER = _NORMS + _ATTENTION + _MLP


def _counts(flags: str, ranks: int, *, base: str = DENSE) -> list[int]:
    return [stage.count.total for stage in stages_of(model_of(arguments(flags, world_size=ranks, base=base)))]


def test_one_rank() -> None:
    # The vocabulary of 509 is padded to 512.
    assert _counts("", 1) == [4 * _LAYER + 48 + 2 * 512 * 48]
    assert whole_model(model_of(arguments())) == 4 * _LAYER + 48 + 2 * 509 * 48


def test_tensor_parallel_ranks_have_all_norms_and_their_share_of_the_rest() -> None:
    assert _counts("--tensor-model-parallel-size 2", 2) == [
        4 * (_NORMS + (_ATTENTION + _MLP) // 2) + 48 + 2 * 512 * 48 // 2
    ]


def test_stages() -> None:
    assert _counts("--pipeline-model-parallel-size 2", 2) == [2 * _LAYER + 512 * 48, 2 * _LAYER + 48 + 512 * 48]
    assert _counts("--pipeline-model-parallel-size 3 --num-layer-list 2,1,1", 3) == [
        2 * _LAYER + 512 * 48,
        _LAYER,
        _LAYER + 48 + 512 * 48,
    ]
    # Layers 0 and 5 do nothing and weigh nothing.
    assert _counts("--num-layers 6 --noop-layers 0,5 --pipeline-model-parallel-size 2", 2) == [
        2 * _LAYER + 512 * 48,
        2 * _LAYER + 48 + 512 * 48,
    ]


def test_a_tied_output_layer_is_a_copy_on_the_last_stage() -> None:
    tied = DENSE.replace("--untie-embeddings-and-output-weights ", "")
    assert _counts("", 1, base=tied) == [4 * _LAYER + 48 + 512 * 48]
    assert _counts("--pipeline-model-parallel-size 2", 2, base=tied) == [
        2 * _LAYER + 512 * 48,
        2 * _LAYER + 48 + 512 * 48,
    ]


def test_virtual_stages_hold_the_same_layers_in_all() -> None:
    flags = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 2"
    stages = stages_of(model_of(arguments(flags, world_size=2)))
    assert [[layer for chunk in stage.chunks for _, layer in chunk.layers] for stage in stages] == [[0, 2], [1, 3]]
    assert [stage.count.total for stage in stages] == [2 * _LAYER + 512 * 48, 2 * _LAYER + 48 + 512 * 48]


@pytest.mark.parametrize("grouped", ["", "--moe-grouped-gemm"])
def test_experts_are_dealt_out(grouped: str) -> None:
    flags = f"{EXPERTS} {grouped} --expert-model-parallel-size 3 --moe-shared-expert-intermediate-size 56 "
    flags += "--shared-expert-gate --first-k-dense-replace 1"
    args = arguments(flags, world_size=3)
    [stage] = stages_of(model_of(args))
    expert, shared = 3 * 40 * 48, 3 * 56 * 48 + 48
    assert stage.count.experts == 3 * (6 // 3) * expert
    assert stage.count.shared == (4 * (_NORMS + _ATTENTION) + _MLP + 3 * (6 * 48 + shared) + 48 + 2 * 512 * 48)
    whole = 4 * (_NORMS + _ATTENTION) + _MLP + 3 * (6 * 48 + shared) + 48 + 2 * 509 * 48
    assert whole_model(model_of(args)) == whole + 3 * 6 * expert
    assert active_per_token(model_of(args), args.moe_router_topk) == whole + 3 * 2 * expert


def test_experts_are_cut_or_whole() -> None:
    flags = f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel"
    expert = 3 * 40 * 48
    [cut] = stages_of(model_of(arguments(flags, world_size=2)))
    assert cut.count.experts == 4 * 6 * expert // 2
    [whole] = stages_of(model_of(arguments(f"{flags} --expert-tensor-parallel-size 1", world_size=2)))
    assert whole.count.experts == 4 * 6 * expert


def test_a_model_of_no_family() -> None:
    """GPT-2: learned positions, norms and linear layers with biases, an MLP without gate; sizes of its smallest."""
    gpt2 = (
        "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --vocab-size 50257 --max-position-embeddings 1024 "
        "--make-vocab-size-divisible-by 1 --seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt2"]())
    model.tie_weights()
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert expected == 124_439_808
    assert whole_model(model_of(arguments(base=gpt2))) == expected
