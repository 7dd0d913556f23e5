"""`--model-from-hf`: the structure flags of a Hugging Face directory."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.training.arguments.model_from_hf import apply_model_from_hf
from mindspeed_llm.training.arguments.parser import parse
from mindspeed_llm.training.arguments.validate import validate
from tests.support.toys import TOYS

_REST = "--seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"


def save_config(folder: Path, toy: str, **changes: Any) -> Path:
    """A directory with the config.json of a toy, as transformers writes it."""
    fields = {**TOYS[toy], **changes}
    CONFIG_MAPPING[fields.pop("model_type")](**fields).save_pretrained(folder)
    # Which class it is, only a model writes.
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = [_CLASSES[toy]]
    path.write_text(json.dumps(config))
    return folder


_CLASSES = {
    "llama": "LlamaForCausalLM",
    "llama_tied": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma": "GemmaForCausalLM",
}


def from_hf(folder: Path, flags: str = "") -> tuple[Namespace, str]:
    args = parse(shlex.split(f"{_REST} --model-from-hf {folder} {flags}"), FEATURES)
    return args, apply_model_from_hf(args)


def test_all_sizes_are_taken(tmp_path: Path) -> None:
    args, text = from_hf(save_config(tmp_path, "qwen3"))
    validate(args, 1)
    expected = {
        "num_layers": 4,
        "hidden_size": 48,
        "ffn_hidden_size": 88,
        "num_attention_heads": 6,
        "num_query_groups": 2,
        "group_query_attention": True,
        "kv_channels": 16,
        "vocab_size": 509,
        "padded_vocab_size": 512,
        "max_position_embeddings": 256,
        "untie_embeddings_and_output_weights": True,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "position_embedding_type": "rope",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "num_experts": None,
        "sliding_window": None,
    }
    assert {name: getattr(args, name) for name in expected} == expected
    assert text.startswith(f"--model-from-hf {tmp_path} (Qwen3ForCausalLM) sets:\n  --num-layers 4 --hidden-size 48 ")
    assert "--qk-layernorm" in text
    assert "--disable-bias-linear" in text
    assert "--add-qkv-bias" not in text


def test_the_block_is_a_command_line_for_the_same_model(tmp_path: Path) -> None:
    args, text = from_hf(save_config(tmp_path, "qwen3_moe", decoder_sparse_step=2))
    words = shlex.split(" ".join(text.splitlines()[1:]))
    again = parse(shlex.split(_REST) + words, FEATURES)
    for parsed in (args, again):
        validate(parsed, 1)
    hidden = ("given", "model_from_hf", "notices")
    assert {k: v for k, v in vars(args).items() if k not in hidden} == {
        k: v for k, v in vars(again).items() if k not in hidden
    }
    assert args.moe_layer_pattern == [0, 1, 0, 1]


@pytest.mark.parametrize("toy", ["llama", "llama_tied", "qwen3_moe", "mixtral"])
def test_families(tmp_path: Path, toy: str) -> None:
    args, _ = from_hf(save_config(tmp_path, toy))
    validate(args, 1)
    assert args.untie_embeddings_and_output_weights is (toy != "llama_tied")
    assert args.num_experts == (6 if "num_experts" in TOYS[toy] or toy == "mixtral" else None)
    assert args.norm_topk_prob is (args.num_experts is not None)


def test_flags_that_agree_are_kept_and_training_flags_are_free(tmp_path: Path) -> None:
    folder = save_config(tmp_path, "qwen3_moe")
    args, text = from_hf(
        folder,
        "--hidden-size 48 --disable-bias-linear --group-query-attention --moe-layer-freq -1 --init-method-std 0.5 "
        "--moe-aux-loss-coeff 0.25 --padded-vocab-size 600",
    )
    validate(args, 1)
    assert (args.init_method_std, args.moe_aux_loss_coeff, args.padded_vocab_size) == (0.5, 0.25, 600)
    assert "--hidden-size" not in text
    assert "--init-method-std" not in text


@pytest.mark.parametrize(
    ("toy", "flags", "message"),
    [
        ("qwen3", "--hidden-size 64", "--hidden-size 64 (config.json: 48)"),
        ("qwen3", "--norm-epsilon 1e-5", "--norm-epsilon 1e-05 (config.json: 1e-06)"),
        ("llama", "--qk-layernorm", "--qk-layernorm (config.json: none)"),
        ("qwen3", "--num-experts 8", "--num-experts 8 (config.json: none)"),
        ("qwen3", "--sliding-window 8", "--sliding-window 8 (config.json: none)"),
        ("qwen3_moe", "--first-k-dense-replace 1 --moe-layer-freq 1", "--moe-layer-freq 1 (config.json: ([1]*4))"),
        ("llama_tied", "--untie-embeddings-and-output-weights", "--untie-embeddings-and-output-weights (config.json: "),
        ("qwen3", "--num-layers 5 --hidden-size 64", "--hidden-size 64 (config.json: 48); --num-layers 5 (config"),
    ],
)
def test_flags_that_contradict_are_refused(tmp_path: Path, toy: str, flags: str, message: str) -> None:
    folder = save_config(tmp_path, toy)
    with pytest.raises(UserError) as error:
        from_hf(folder, flags)
    assert message in str(error.value)
    assert f"flags contradict {folder / 'config.json'}" in str(error.value)


@pytest.mark.parametrize("kind", ["none", "sinkhorn"])
def test_no_weight_for_a_loss_that_there_is_not(tmp_path: Path, kind: str) -> None:
    folder = save_config(tmp_path, "qwen3_moe")
    args, text = from_hf(folder, f"--moe-router-load-balancing-type {kind}")
    validate(args, 1)
    assert args.moe_aux_loss_coeff == 0 and "--moe-aux-loss-coeff" not in text


def test_layers_without_effect_come_on_top(tmp_path: Path) -> None:
    folder = save_config(tmp_path, "qwen3_moe", decoder_sparse_step=2)
    args, _ = from_hf(folder, "--noop-layers 0,5 --num-layers 6")
    validate(args, 1)
    assert (args.num_layers, args.moe_layer_pattern) == (6, [0, 0, 1, 0, 1, 0])
    with pytest.raises(UserError, match="--noop-layers 6,0: expected different positions from 0 to 5"):
        from_hf(folder, "--noop-layers 6,0")


def test_the_tokenizer_of_the_directory_is_taken_where_none_is_given(tmp_path: Path) -> None:
    folder = save_config(tmp_path, "qwen3")
    assert from_hf(folder)[0].tokenizer_name_or_path is None
    (folder / "tokenizer.json").write_text("{}")
    args, text = from_hf(folder)
    assert args.tokenizer_name_or_path == str(folder)
    assert f"--tokenizer-name-or-path {folder}" in text.replace("\n  ", " ")
    assert from_hf(folder, "--tokenizer-type GPTSentencePieceTokenizer")[0].tokenizer_name_or_path is None


def test_what_is_no_model_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none is no folder; expected a Hugging Face model directory"):
        from_hf(tmp_path / "none")
    with pytest.raises(UserError, match=r"has no config\.json; expected"):
        from_hf(tmp_path)
    with pytest.raises(UserError, match="gemma"):
        from_hf(save_config(tmp_path, "gemma"))
