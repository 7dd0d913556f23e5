"""The arguments that a Hugging Face configuration decides, and the models that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.families import of_config
from mindspeed_llm.tasks.models.hf_arguments import hf_arguments
from tests.support.toys import TOYS
from tests.tasks.models.families import FAMILIES


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """config.json of a toy, as transformers writes it."""
    fields = {**TOYS["llama"], **FAMILIES[name], **changes}
    return CONFIG_MAPPING[fields.pop("model_type")](**fields).to_dict() | {"model_type": FAMILIES[name]["model_type"]}


def arguments(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    return hf_arguments(of_config(config, "config.json"), config, "config.json", **options)


def test_every_structure_flag_of_a_dense_model() -> None:
    assert arguments(config_of("qwen3")) == {
        "num_layers": 4,
        "hidden_size": 48,
        "ffn_hidden_size": 88,
        "num_attention_heads": 6,
        "num_query_groups": 2,
        "group_query_attention": True,
        "kv_channels": 16,
        "vocab_size": 509,
        "max_position_embeddings": 256,
        "untie_embeddings_and_output_weights": True,
        "init_method_std": 0.02,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-06,
        "position_embedding_type": "rope",
        "rotary_base": 10000.0,
        "rotary_percent": 1.0,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": True,
    }


def test_every_flag_of_experts() -> None:
    found = arguments(config_of("qwen2-moe"))
    assert {name: value for name, value in found.items() if "moe" in name or "expert" in name or "topk" in name} == {
        "num_experts": 6,
        "moe_layer_freq": (1, 0, 1, 1),
        "moe_ffn_hidden_size": 40,
        "moe_router_topk": 2,
        "moe_router_score_function": "softmax",
        "norm_topk_prob": False,
        "moe_aux_loss_coeff": 0.001,
        "moe_shared_expert_intermediate_size": 56,
        "shared_expert_gate": True,
    }
    assert found["add_qkv_bias"]
    assert arguments(config_of("mixtral"))["ffn_hidden_size"] == 40
    assert arguments(config_of("mixtral"))["norm_topk_prob"]
    assert arguments(config_of("qwen3-moe-steps"))["moe_layer_freq"] == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("name", "changes", "window", "pattern"),
    [
        ("llama2", {}, None, None),
        ("mistral", {}, 8, None),
        ("mistral", {"sliding_window": None}, None, None),
        ("mixtral", {}, 8, None),
        ("qwen3", {"sliding_window": 8}, None, None),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, 8, None),
        ("qwen25-tied-windows", {}, 8, (0, 0, 1, 1)),
        ("qwen25-tied-windows", {"max_window_layers": 4}, None, None),
        ("qwen2-moe", {}, 8, (1, 0, 1, 0)),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 8}, 8, None),
    ],
)
@pytest.mark.parametrize("spelling", ["by layer", "by number"])
def test_layers_with_a_sliding_window(
    name: str, changes: dict[str, Any], window: int | None, pattern: tuple[int, ...] | None, spelling: str
) -> None:
    config = config_of(name, **changes)
    if spelling == "by number":
        # As published before transformers listed the kinds of all layers.
        config.pop("layer_types", None)
        config |= {"sliding_window": changes.get("sliding_window", FAMILIES[name].get("sliding_window", 4096))}
    found = arguments(config)
    assert (found.get("sliding_window"), found.get("window_attn_skip_freq")) == (window, pattern)


def test_layers_that_do_nothing_have_a_place_in_every_list() -> None:
    found = arguments(config_of("qwen2-moe"), noop_layers=(0, 3))
    assert found["num_layers"] == 6
    assert found["moe_layer_freq"] == (0, 1, 0, 0, 1, 1)
    assert found["window_attn_skip_freq"] == (0, 1, 0, 0, 1, 0)


def test_biases_of_all_linear_layers_or_of_queries_keys_and_values() -> None:
    found = arguments(config_of("llama-biases"))
    assert found["add_bias_linear"] and found["add_qkv_bias"]
    found = arguments(config_of("qwen25"))
    assert not found["add_bias_linear"] and found["add_qkv_bias"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama2",
            {"attention_bias": True},
            "attention_bias and mlp_bias: this backend has biases in all linear layers",
        ),
        ("llama2", {"mlp_bias": True}, "attention_bias and mlp_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias and mlp_bias"),
        ("llama2", {"hidden_act": "gelu"}, "hidden_act: MLPs gated by GELU are not available"),
        (
            "llama2",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope type 'dynamic' is not available in this backend; expected one of default, linear, llama3, yarn",
        ),
        (
            "llama2",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "original_max_position_embeddings": 128,
                    "truncate": False,
                }
            },
            "YaRN with truncate = false",
        ),
    ],
)
def test_models_that_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        arguments(config_of(name, **changes))


def test_families_that_are_refused() -> None:
    config = CONFIG_MAPPING["gemma2"]().to_dict()
    with pytest.raises(
        UserError, match=r"models of type 'gemma2' are not available in this backend; expected one of l"
    ):
        arguments(config)
