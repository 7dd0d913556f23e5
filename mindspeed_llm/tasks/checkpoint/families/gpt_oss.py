"""gpt-oss: experts with biases, all of a layer in one tensor, gate and up in turn; attention with a learnt sink.

gate_up_proj    [experts, hidden, gate 0 | up 0 | gate 1 | up 1 | ...]      down_proj    [experts, ffn, hidden]

Upstream has no converter of it. Keys are those of megatron-core's own modules: `softmax_offset` is its learnable
softmax type, and biases stand beside the weights that they belong to.
"""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import ATTENTION, ATTENTION_BIASES, NORMS, router
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.families.settings import (
    SIZES,
    heads,
    moe,
    norm,
    rotary,
    sliding_window,
    softmax_router,
    windows,
)
from mindspeed_llm.tasks.checkpoint.fields import Field
from mindspeed_llm.tasks.checkpoint.rules import COLUMNS, ROWS, WHOLE, Rule
from mindspeed_llm.tasks.checkpoint.tables import Entry, Hf, Refused, entry, hf


def _turn(index: int) -> tuple[Hf, Hf]:
    """Weight and bias of gate (0) or up (1) of an expert."""
    return (
        hf("mlp.experts.gate_up_proj", "experts hidden (expert_ffn 2)", {0: "expert", 3: index}, order=(2, 1)),
        hf("mlp.experts.gate_up_proj_bias", "experts (expert_ffn 2)", {0: "expert", 2: index}),
    )


def _both_layouts(layer: str, kind: str, sources: tuple[Hf, ...], rule: Rule) -> tuple[Entry, Entry]:
    """Sequential experts, and grouped ones under Transformer Engine."""
    return (
        entry(f"mlp.experts.local_experts.{{local}}.{layer}.{kind}", *sources, rule=rule, when="moe !grouped"),
        entry(f"mlp.experts.{layer}.{kind}{{local}}", *sources, rule=rule, when="moe grouped"),
    )


_GATE, _UP = _turn(0), _turn(1)
_DOWN = hf("mlp.experts.down_proj", "experts expert_ffn hidden", {0: "expert"}, order=(2, 1))
_DOWN_BIAS = hf("mlp.experts.down_proj_bias", "experts hidden", {0: "expert"})

GPT_OSS = replace(
    LLAMA,
    ids=("gpt-oss",),
    architectures=("GptOssForCausalLM",),
    model_type="gpt_oss",
    models="gpt-oss 20B, 120B (MXFP4 as published, or 16 bit)",
    fields=(
        *(*SIZES, *norm(1e-5), *rotary(150000.0), *heads(64)),
        Field(mg="add_qkv_bias", hf=("attention_bias",), default=True),
        Field(mg="add_dense_bias", hf=("attention_bias",), default=True, written=False),
        *(sliding_window(128), windows(every=2)),
        *(*moe("num_local_experts", "intermediate_size"), *softmax_router(normalised=True)),
        Field(mg="swiglu_limit", hf=("swiglu_limit",), default=7.0),
        Field(mg="swiglu_alpha", hf=("swiglu_alpha",), default=1.702),
    ),
    # The gate is x * sigmoid(alpha * x), and one is added to the linear half.
    constants={"swiglu": True, "glu_linear_offset": 1.0, "softmax_type": "learnable", "add_bias_linear": True},
    layer=(
        *(*NORMS, *ATTENTION, *ATTENTION_BIASES),
        entry("self_attention.core_attention.softmax_offset", hf("self_attn.sinks", "heads"), rule=ROWS),
        *router("mlp.router.weight"),
        entry("mlp.router.bias", hf("mlp.router.bias", "experts"), rule=WHOLE, when="moe"),
        *_both_layouts("linear_fc1", "weight", (_GATE[0], _UP[0]), ROWS),
        *_both_layouts("linear_fc1", "bias", (_GATE[1], _UP[1]), ROWS),
        *_both_layouts("linear_fc2", "weight", (_DOWN,), COLUMNS),
        *_both_layouts("linear_fc2", "bias", (_DOWN_BIAS,), WHOLE),
    ),
    refused=(
        Refused(
            when="grouped !te",
            flags="--moe-grouped-gemm",
            reason="its experts have biases, which grouped experts hold under --transformer-impl transformer_engine "
            "only; add that flag, or leave this one out",
        ),
    ),
)
