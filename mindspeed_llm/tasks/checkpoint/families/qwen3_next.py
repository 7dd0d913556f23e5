"""Qwen3-Next: gated delta-net layers with a full attention layer in between, and a gated shared expert."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    DENSE_MLP,
    GATED_SHARED_EXPERT,
    LAST,
    NORMS,
    experts,
    mtp_of_main_embedding,
    router,
)
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.families.settings import (
    ACTIVATION,
    MLP,
    MTP_LAYERS,
    SHARED_BY_SIZE,
    SIZES,
    SPARSE_STEP,
    heads,
    moe,
    norm,
    rotary,
    softmax_router,
)
from mindspeed_llm.tasks.checkpoint.fields import Config, Field, Settings, changed
from mindspeed_llm.tasks.checkpoint.rules import ROWS, WHOLE
from mindspeed_llm.tasks.checkpoint.tables import Entry, Limit, entry, hf


def _interval(config: Config) -> int | None:
    """Every which layer has full attention, by the kinds of all layers."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    interval = next((layer for layer, kind in enumerate(kinds, 1) if kind == "full_attention"), len(kinds) + 1)
    if any((kind == "full_attention") != (layer % interval == 0) for layer, kind in enumerate(kinds, 1)):
        raise ValueError("layer_types has full attention at uneven distances; expected every n-th layer")
    return interval


_LINEAR = (
    Field(mg="full_attention_interval", hf=("full_attention_interval", _interval), default=4),
    Field(mg="linear_num_key_heads", hf=("linear_num_key_heads",), required=True),
    Field(mg="linear_key_head_dim", hf=("linear_key_head_dim",), required=True),
    Field(mg="linear_num_value_heads", hf=("linear_num_value_heads",), required=True),
    Field(mg="linear_value_head_dim", hf=("linear_value_head_dim",), required=True),
    Field(mg="mamba_d_conv", hf=("linear_conv_kernel_dim",), default=4),
)
_DIMENSIONS = {
    "keys": lambda s: s["num_query_groups"] * s["kv_channels"],
    # A query projection also has a gate for each value that attention gives.
    "gated_queries": lambda s: 2 * s["num_attention_heads"] * s["kv_channels"],
    "linear_heads": lambda s: s["linear_num_value_heads"],
    "linear_values": lambda s: s["linear_num_value_heads"] * s["linear_value_head_dim"],
    "linear_value_dim": lambda s: s["linear_value_head_dim"],
    "linear_qkv": lambda s: _linear_keys(s) * 2 + s["linear_num_value_heads"] * s["linear_value_head_dim"],
    "linear_qkvz": lambda s: _linear_keys(s) * 2 + 2 * s["linear_num_value_heads"] * s["linear_value_head_dim"],
    "linear_ba": lambda s: 2 * s["linear_num_value_heads"],
    "conv_kernel": lambda s: s["mamba_d_conv"],
}


def _linear_keys(settings: Settings) -> int:
    return settings["linear_num_key_heads"] * settings["linear_key_head_dim"]


def _same(mg: str, name: str, shape: str, when: str) -> Entry:
    return entry(f"self_attention.{mg}", hf(name, shape), rule=WHOLE, when=when)


_FULL_ATTENTION = tuple(
    _same(mg, f"self_attn.{name}", shape, "full_attention")
    for mg, name, shape in (
        ("q_proj.weight", "q_proj.weight", "gated_queries hidden"),
        ("k_proj.weight", "k_proj.weight", "keys hidden"),
        ("v_proj.weight", "v_proj.weight", "keys hidden"),
        ("linear_proj.weight", "o_proj.weight", "hidden attention"),
        ("q_layernorm.weight", "q_norm.weight", "head_dim"),
        ("k_layernorm.weight", "k_norm.weight", "head_dim"),
    )
)
_LINEAR_ATTENTION = tuple(
    _same(name, f"linear_attn.{name}", shape, "!full_attention")
    for name, shape in (
        ("A_log", "linear_heads"),
        ("dt_bias", "linear_heads"),
        ("conv1d.weight", "linear_qkv 1 conv_kernel"),
        ("in_proj_qkvz.weight", "linear_qkvz hidden"),
        ("in_proj_ba.weight", "linear_ba hidden"),
        ("norm.weight", "linear_value_dim"),
        ("out_proj.weight", "hidden linear_values"),
    )
)

QWEN3_NEXT = replace(
    LLAMA,
    ids=("qwen3-next",),
    architectures=("Qwen3NextForCausalLM",),
    model_type="qwen3_next",
    models="Qwen3-Next, Qwen3-Coder-Next",
    fields=(
        *(*SIZES, *norm(), *rotary(part=0.25), *heads(256), MLP, ACTIVATION),
        *(*SPARSE_STEP, *moe("num_experts"), SHARED_BY_SIZE, *_LINEAR),
        *changed(softmax_router(), "norm_topk_prob", default=True),
        # Most config.json of this family do not count the one MTP layer that it has.
        replace(MTP_LAYERS, default=1),
    ),
    # Norms multiply by one plus their weight, that of linear attention excepted.
    constants={"qk_layernorm": True, "shared_expert_gate": True, "add_rmsnorm_offset": True},
    dimensions=_DIMENSIONS,
    layer=(
        *(*NORMS, *_FULL_ATTENTION, *_LINEAR_ATTENTION, *DENSE_MLP),
        *(*router(), *experts(), *GATED_SHARED_EXPERT),
    ),
    # Its MTP layer has no embedding of its own.
    last=(*LAST, *mtp_of_main_embedding()),
    mtp=(
        entry("mtp.layers.{mtp}.enorm.weight", hf("mtp.pre_fc_norm_embedding.weight", "hidden"), rule=WHOLE),
        entry("mtp.layers.{mtp}.hnorm.weight", hf("mtp.pre_fc_norm_hidden.weight", "hidden"), rule=WHOLE),
        entry("mtp.layers.{mtp}.eh_proj.weight", hf("mtp.fc.weight", "hidden two_hidden"), rule=ROWS),
        entry("mtp.final_layernorms.{mtp}.weight", hf("mtp.norm.weight", "hidden"), rule=WHOLE),
    ),
    mtp_prefix="mtp.layers.{mtp}.",
    mtp_ends_prefix="",
    mtp_layer_conditions={"full_attention": True},
    mtp_pattern="mtp.*",
    limits=(
        Limit(attribute="tp", most=1, reason="its attention layers have no tensor parallel form"),
        Limit(attribute="mtp_num_layers", most=1, reason="the tensors around its MTP layer carry no number"),
    ),
)
