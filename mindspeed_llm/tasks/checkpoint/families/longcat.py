"""LongCat Flash: each layer has two attentions and two MLPs, and experts beside the second half.

Some of the experts that the router chooses from do nothing: they have a row in the router, and no weights.
"""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import LATENT_ATTENTION, experts, gated_mlp, router
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.families.settings import (
    ACTIVATION,
    LATENT,
    MLP,
    SIZES,
    moe,
    norm,
    rotary,
)
from mindspeed_llm.tasks.checkpoint.fields import Field, Written, without
from mindspeed_llm.tasks.checkpoint.rules import WHOLE
from mindspeed_llm.tasks.checkpoint.tables import Dropped, Entry, Refused, entry, hf


def _attention(index: int) -> tuple[Entry, ...]:
    """One of the two attentions, under its number on both sides."""
    return tuple(
        replace(
            item,
            mg=item.mg.replace("self_attention.", f"self_attention_{index}."),
            sources=tuple(
                replace(source, name=source.name.replace("self_attn.", f"self_attn.{index}."))
                for source in item.sources
            ),
        )
        for item in LATENT_ATTENTION
    )


def _half(index: int) -> tuple[Entry, ...]:
    return (
        entry(f"input_layernorm_{index}.weight", hf(f"input_layernorm.{index}.weight", "hidden"), rule=WHOLE),
        *_attention(index),
        entry(
            f"pre_mlp_layernorm_{index}.weight", hf(f"post_attention_layernorm.{index}.weight", "hidden"), rule=WHOLE
        ),
        *gated_mlp(f"mlps.{index}.", f"mlps_{index}.", "ffn"),
    )


LONGCAT = replace(
    LLAMA,
    ids=("longcat",),
    architectures=("LongcatFlashForCausalLM",),
    model_type="longcat_flash",
    models="LongCat-Flash",
    fields=(
        Field(mg="num_layers", hf=("num_layers",), required=True),
        *(*without(SIZES, "num_layers"), *norm(1e-5), *rotary(1e7), *LATENT, ACTIVATION),
        # The class takes the part of a head that turns from here.
        Written(hf="head_dim", value=lambda s: s["qk_pos_emb_head_dim"]),
        replace(MLP, hf=("ffn_hidden_size",)),
        *moe("n_routed_experts", "expert_ffn_hidden_size", top_k="moe_topk"),
        Field(mg="num_zero_experts", hf=("zero_expert_num",), default=256),
        Field(mg="moe_router_score_function", default="softmax"),
        Field(mg="moe_router_pre_softmax", default=True),
        Field(mg="moe_router_enable_expert_bias", default=True),
        Field(mg="norm_topk_prob", hf=("norm_topk_prob",), default=False),
        Field(mg="moe_router_topk_scaling_factor", hf=("routed_scaling_factor",), default=6.0),
    ),
    constants={
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "enable_mla_scale_q_lora": True,
        "enable_mla_scale_kv_lora": True,
    },
    dimensions={"all_experts": lambda s: s["num_experts"] + (s["num_zero_experts"] or 0)},
    layer=(
        *(*_half(0), *_half(1), *experts()),
        *router("mlp.router.classifier.weight", "mlp.router.e_score_correction_bias", rows="all_experts"),
    ),
    dropped=(
        *LLAMA.dropped,
        Dropped(pattern="model.mtp.*", reason="its MTP layer has no place in Megatron's model"),
        Dropped(
            pattern="model.layers.*.mlp.experts.{number}.*",
            numbers=("experts", "all_experts"),
            reason="experts that do nothing need no weights",
        ),
    ),
    refused=(
        Refused(
            when="te",
            flags="--transformer-impl transformer_engine",
            reason="its layers have two of each norm, which no layer of Transformer Engine has; leave the flag out",
        ),
    ),
)
