"""Qwen 2, 2.5 and 3: dense models, and their MoE forms."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    ATTENTION,
    ATTENTION_BIASES,
    DENSE_MLP,
    GATED_SHARED_EXPERT,
    NORMS,
    QK_NORM,
    experts,
    router,
)
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.families.settings import (
    ACTIVATION,
    ALTERNATING_WINDOW_LAYERS,
    ATTENTION_BIAS,
    DENSE,
    MLP,
    OPTIONAL_WINDOW,
    ROTARY,
    SHARED_BY_SIZE,
    SIZES,
    SPARSE_STEP,
    WINDOW_LAYERS,
    heads,
    moe,
    norm,
    softmax_router,
)
from mindspeed_llm.tasks.checkpoint.fields import Field

_MOE = (*SPARSE_STEP, *moe("num_experts"), *softmax_router())

QWEN25 = replace(
    LLAMA,
    ids=("qwen25", "qwen2"),
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    models="Qwen 2, Qwen 2.5, QwQ",
    fields=(*DENSE, *OPTIONAL_WINDOW, WINDOW_LAYERS),
    constants={"add_qkv_bias": True},
    layer=(*NORMS, *ATTENTION, *ATTENTION_BIASES, *DENSE_MLP),
)
QWEN3 = replace(
    LLAMA,
    ids=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    models="Qwen 3",
    fields=(*SIZES, *norm(), *ROTARY, *heads(128), MLP, ACTIVATION, *ATTENTION_BIAS, *OPTIONAL_WINDOW, WINDOW_LAYERS),
    constants={"qk_layernorm": True},
    layer=(*NORMS, *ATTENTION, *ATTENTION_BIASES, *QK_NORM, *DENSE_MLP),
)
QWEN2_MOE = replace(
    QWEN25,
    ids=("qwen2-moe",),
    architectures=("Qwen2MoeForCausalLM",),
    model_type="qwen2_moe",
    models="Qwen 1.5 MoE, Qwen 2 MoE",
    fields=(
        *(*DENSE, *OPTIONAL_WINDOW, ALTERNATING_WINDOW_LAYERS, *_MOE, SHARED_BY_SIZE),
        Field(mg="add_qkv_bias", hf=("qkv_bias",), default=True),
    ),
    constants={"shared_expert_gate": True},
    layer=(*QWEN25.layer, *router(), *experts(), *GATED_SHARED_EXPERT),
)
QWEN3_MOE = replace(
    QWEN3,
    ids=("qwen3-moe",),
    architectures=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    models="Qwen 3 MoE (30B-A3B, 235B-A22B, Coder 480B-A35B)",
    fields=(*DENSE, *ATTENTION_BIAS, *OPTIONAL_WINDOW, *_MOE),
    layer=(*QWEN3.layer, *router(), *experts()),
)
