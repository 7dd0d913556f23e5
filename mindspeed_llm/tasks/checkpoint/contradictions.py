"""What a Megatron checkpoint's arguments say, against config.json and against what a model family can be.

Shapes and keys show most of a model by themselves. What they do not show (how many heads a projection holds, the base
of the rotary positions, the activation) is believed only where nothing says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.fields import Choice, Field, nested
from mindspeed_llm.tasks.checkpoint.tables import Family

# Settings that no shape shows for sure. A name alone: by any of its spellings in the arguments.
_COMPARED = {
    *("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "num_experts", "moe_router_topk"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("index_n_heads", "index_head_dim", "index_topk"),
    *("mamba_state_dim", "mamba_num_groups", "mamba_head_dim", "mamba_num_heads", "mamba_chunk_size"),
    *("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim"),
    *("rotary_base", "norm_epsilon", "partial_rotary_factor", "sliding_window", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "output_logit_softcapping", "swiglu_limit", "swiglu_alpha"),
    *("norm_topk_prob", "untie_embeddings_and_output_weights"),
}
# Likewise, but only by Megatron's own name: under the others, runs have values of their own.
_COMPARED_BY_NAME = {"moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor"}
_FLAGS = {
    "--target-tensor-parallel-size": "tensor_model_parallel_size",
    "--target-pipeline-parallel-size": "pipeline_model_parallel_size",
    "--target-expert-parallel-size": "expert_model_parallel_size",
    "--expert-tensor-parallel-size": "expert_tensor_parallel_size",
    "--num-layers-per-virtual-pipeline-stage": "num_layers_per_virtual_pipeline_stage",
    "--num-layer-list": "num_layer_list",
    "--noop-layers": "noop_layers",
    "--schedules-method": "schedules_method",
    "--mtp-num-layers": "mtp_num_layers",
    "--moe-tp-extend-ep": "moe_tp_extend_ep",
    "--moe-grouped-gemm": "moe_grouped_gemm",
    "--mla-mm-split": "mla_mm_split",
    "--transformer-impl": "transformer_impl",
    "--padded-vocab-size": "padded_vocab_size",
}
"""Flag for an output -> the argument of a checkpoint that says the same of an input."""
# Of these models, the class in transformers turns whole heads only.
_WHOLE_ROTARY = {
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    *("gemma2", "gemma3_text", "gpt_oss", "seed_oss", "internlm3", "phimoe"),
}


@contextmanager
def said_by(where: str) -> Iterator[None]:
    """Have errors about the way in which a checkpoint is split speak of its arguments, not of the flags for an output.

    Args:
        where: the file that has the arguments.

    Raises:
        UserError: the one raised inside, reworded where it names a flag.
    """
    try:
        yield
    except UserError as error:
        message = str(error)
        for flag, name in _FLAGS.items():
            message = message.replace(flag, name)
        if message == str(error):
            raise
        raise UserError(f"{where}: what its arguments say does not fit together: {message}") from None


def refuse_contradicted(
    family: Family, settings: Mapping[str, Any], arguments: Mapping[str, Any], where: str, config: str
) -> None:
    """Refuse a config.json that says another model than the checkpoint's own arguments.

    Args:
        settings: by config.json.
        arguments: of the checkpoint, where it has any.
        where: the file with the arguments.
        config: the config.json.

    Raises:
        UserError: names the setting and both values.
    """
    for spec in family.fields:
        if isinstance(spec, Field):
            mine, said = settings.get(spec.mg), _said(spec, arguments)
            if mine is not None and said and not any(_equal(mine, value) for value in said):
                raise UserError(
                    f"{config} says {spec.mg} {mine}, but the checkpoint was made with {said[0]} ({where}); give the "
                    "config.json of this model in --hf-cfg-dir, or correct it"
                )
    kind = arguments.get("rope_scaling_type")
    if kind is not None and "rope_scaling_type" in settings and str(kind) != str(settings["rope_scaling_type"]):
        raise UserError(
            f"{config} says rope_scaling_type {settings['rope_scaling_type']}, but the checkpoint was made with {kind} "
            f"({where}); give the config.json of this model in --hf-cfg-dir, or correct it"
        )


def refuse_impossible(family: Family, settings: Mapping[str, Any], arguments: Mapping[str, Any], where: str) -> None:
    """Refuse arguments that no model of the family can have: its config.json would not say what they do.

    Args:
        settings: of the model, by config.json or by these arguments.
        arguments: of the checkpoint.
        where: the file with the arguments.

    Raises:
        UserError: names the argument, its value and what the family has.
    """

    def refuse(name: str, expected: str) -> None:
        raise UserError(
            f"{where}: its arguments say {name} {arguments[name]}, but a {family.ids[0]} model has {expected}; check "
            "--model-type-hf. If the arguments are wrong, correct them in the checkpoint"
        )

    defaults = {spec.mg: spec.default for spec in family.fields if isinstance(spec, Field)}
    of_family = defaults | dict(family.constants)
    norm = of_family.get("normalization")
    if norm is not None and arguments.get("normalization") not in (None, norm):
        refuse("normalization", str(norm))
    if (
        defaults.get("position_embedding_type") == "rope"
        and arguments.get("position_embedding_type") in ("learned_absolute", "relative", "none")
        and not arguments.get("use_rotary_position_embeddings")
    ):
        refuse("position_embedding_type", "rotary positions (rope)")
    _activation(family, settings, arguments, refuse)
    for name in ("qk_layernorm", "multi_latent_attention"):
        if arguments.get(name) and not settings.get(name):
            refuse(name, "none (False)")
    if arguments.get("apply_layernorm_1p") and not settings.get("add_rmsnorm_offset"):
        refuse("apply_layernorm_1p", "norms that multiply by their weight (False)")
    biases = ("add_bias_linear", "add_qkv_bias", "add_dense_bias", "add_mlp_bias")
    if arguments.get("add_bias_linear") and not any(settings.get(name) for name in biases):
        refuse("add_bias_linear", "no such biases (False)")
    if arguments.get("rotary_interleaved") and not (
        settings.get("rotary_interleaved") or settings.get("multi_latent_attention")
    ):
        refuse("rotary_interleaved", "halves that turn together (False)")
    if family.model_type in _WHOLE_ROTARY:
        for name in ("rotary_percent", "partial_rotary_factor"):
            if arguments.get(name) not in (None, 1, 1.0):
                refuse(name, "heads of which all turns (1.0)")


def _activation(family: Family, settings: Mapping[str, Any], arguments: Mapping[str, Any], refuse: Any) -> None:
    """The flags of the activation, which exclude each other. Upstream's converter says `swiglu` for all families."""
    names = {name for spec in family.fields if isinstance(spec, Choice) for name in spec.names()}
    if not names and "swiglu" not in family.constants:
        return
    meant = ", ".join(sorted(name for name in names | {"swiglu"} if settings.get(name))) or "another activation"
    for name in sorted(names | {"swiglu"}):
        if arguments.get(name) is False and settings.get(name):
            refuse(name, meant)
    others = {"geglu", "squared_relu", "openai_gelu"} | names - {"swiglu"}
    if "swiglu_alpha" not in settings:
        others.add("quick_geglu")
    for name in sorted(others):
        if arguments.get(name) and not settings.get(name):
            refuse(name, meant)


def _said(spec: Field, arguments: Mapping[str, Any]) -> list[Any]:
    """What arguments say of a setting, in all spellings; empty where they do not say it, or nothing that counts."""
    if spec.mg in _COMPARED_BY_NAME:
        return [arguments[spec.mg]] if arguments.get(spec.mg) is not None else []
    if spec.mg not in _COMPARED:
        return []
    if spec.mg == "num_query_groups":
        return _query_groups(arguments)
    names = [spec.mg, *(name for name in spec.also if (name, arguments.get(name)) != ("rotary_percent", 1.0))]
    said = [arguments[name] for name in names if arguments.get(name) is not None]
    keys = [key for key in spec.hf if isinstance(key, str)]
    translated = [
        (not value) if spec.negated else value for key in keys if (value := nested(arguments, key)) is not None
    ]
    return said + ([] if spec.values is not None else translated)


def _query_groups(arguments: Mapping[str, Any]) -> list[Any]:
    """`num_query_groups` counts with `group_query_attention` only, and that flag is missing beside keys of
    config.json.
    """
    if (groups := arguments.get("num_key_value_heads")) is not None:
        return [groups]
    grouped, heads = arguments.get("group_query_attention"), arguments.get("num_attention_heads")
    if grouped is False:
        return [] if heads is None else [heads]
    return [] if arguments.get("num_query_groups") is None else [arguments["num_query_groups"]]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other
