"""The arguments of a run that a Hugging Face configuration decides: the structure of its model.

`tasks.checkpoint` reads the configuration into settings by Megatron's names; here the settings become flags of a
training run, and what the models of this backend cannot do is refused. megatron-core is not needed for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.arguments import from_hf_config
from mindspeed_llm.tasks.checkpoint.conditions import is_moe
from mindspeed_llm.tasks.checkpoint.tables import Family

MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe")
"""The model types of config.json that this backend has."""
# Settings that are arguments as they are.
_SAME = (
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "max_position_embeddings",
    "untie_embeddings_and_output_weights",
    "init_method_std",
    "normalization",
    "norm_epsilon",
    "position_embedding_type",
    "rotary_base",
    "swiglu",
    "add_qkv_bias",
    "qk_layernorm",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_score_function",
    "norm_topk_prob",
    "moe_aux_loss_coeff",
    "moe_shared_expert_intermediate_size",
    "shared_expert_gate",
    "rope_scaling_type",
    "rope_scaling_factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "rope_scaling_original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "rope_scaling_mscale",
    "rope_scaling_mscale_all_dim",
    "rope_scaling_attention_factor",
)
_ROPE_TYPES = (None, "linear", "llama3", "yarn")
# What transformers takes where config.json has no `max_window_layers`.
_MAX_WINDOW_LAYERS = 28


def hf_arguments(
    family: Family, config: Mapping[str, Any], where: str, *, noop_layers: Sequence[int] = ()
) -> dict[str, Any]:
    """The arguments that a config.json decides, by the names of the flags; others keep what the command line says.

    `num_layers`, and lists with an element for each layer, count layers that do nothing as well.

    Args:
        family: the family of the model, see `tasks.checkpoint.families`.
        config: the content of config.json (of the language model).
        where: the file, for messages.
        noop_layers: positions of layers that do nothing (`--noop-layers`).

    Raises:
        UserError: the configuration is not complete, or describes a model that this backend does not have.
    """
    if family.model_type not in MODEL_TYPES:
        raise UserError(
            f"{where}: models of type {family.model_type!r} are not available in this backend; expected one of "
            f"{', '.join(MODEL_TYPES)}"
        )
    settings = from_hf_config(family, config, where)
    _refuse_unknown_parts(settings, where)
    found = {name: settings[name] for name in _SAME if settings.get(name) is not None}
    found["num_layers"] = settings["num_layers"] + len(noop_layers)
    found["group_query_attention"] = settings["num_query_groups"] != settings["num_attention_heads"]
    found["rotary_percent"] = settings["partial_rotary_factor"]
    # Mixtral has no dense layers, and no width of one.
    found["ffn_hidden_size"] = settings.get("ffn_hidden_size") or settings["moe_ffn_hidden_size"]
    found["add_bias_linear"] = bool(settings.get("add_mlp_bias"))
    if settings.get("num_experts"):
        sparse = [int(is_moe(settings, layer)) for layer in range(settings["num_layers"])]
        found["moe_layer_freq"] = _at_positions(sparse, noop_layers)
    windowed = _windowed_layers(family, settings, config)
    if any(windowed):
        found["sliding_window"] = settings["sliding_window"]
        if not all(windowed):
            found["window_attn_skip_freq"] = _at_positions(windowed, noop_layers)
    return found


def _refuse_unknown_parts(settings: Mapping[str, Any], where: str) -> None:
    if settings.get("geglu"):
        raise UserError(f"{where}: hidden_act: MLPs gated by GELU are not available in this backend; expected silu")
    if settings.get("rope_scaling_type") not in _ROPE_TYPES:
        raise UserError(
            f"{where}: rope type {settings['rope_scaling_type']!r} is not available in this backend; expected one of "
            "default, linear, llama3, yarn"
        )
    if settings.get("rope_scaling_truncate") is False:
        raise UserError(f"{where}: YaRN with truncate = false is not available in this backend; expected true")
    biases = {bool(settings.get(name)) for name in ("add_dense_bias", "add_mlp_bias")}
    if len(biases) > 1 or (True in biases and not settings.get("add_qkv_bias")):
        raise UserError(
            f"{where}: attention_bias and mlp_bias: this backend has biases in all linear layers, or in the "
            "projections to query, key and value alone; a model with other ones is not available"
        )


def _windowed_layers(family: Family, settings: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """For each layer 1 where it sees a sliding window only, and 0 where it sees everything."""
    layers = range(settings["num_layers"])
    if settings.get("sliding_window") is None or not settings.get("use_sliding_window", True):
        return tuple(0 for _ in layers)
    kinds = config.get("layer_types")
    if family.model_type in ("mistral", "mixtral", "qwen3_moe"):
        return tuple(1 for _ in layers)
    if kinds is not None:
        return tuple(int(kind == "sliding_attention") for kind in kinds)
    limit = settings.get("max_window_layers")
    limit = _MAX_WINDOW_LAYERS if limit is None else limit
    if family.model_type == "qwen2_moe":
        # The opposite of its dense sister, and every other layer only.
        return tuple(int(layer < limit and layer % 2 == 0) for layer in layers)
    return tuple(int(layer >= limit) for layer in layers)


def _at_positions(of_layers: Sequence[int], noop_layers: Sequence[int]) -> tuple[int, ...]:
    values = iter(of_layers)
    count = len(of_layers) + len(noop_layers)
    return tuple(0 if position in noop_layers else next(values) for position in range(count))
