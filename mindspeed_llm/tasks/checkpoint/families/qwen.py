"""Qwen 2, 2.5 and 3: dense models, and their MoE forms."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    ATTENTION,
    DENSE_FIELDS,
    DENSE_MLP,
    GATED_SHARED_EXPERT,
    NORMS,
    QK_NORM,
    QKV_BIAS,
    SHARED_BY_SIZE,
    SPARSE_STEP,
    experts,
    moe_fields,
    router,
)
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA

_MOE = (*DENSE_FIELDS, *SPARSE_STEP, *moe_fields("num_experts"))

QWEN25 = replace(
    LLAMA,
    ids=("qwen25", "qwen2"),
    architectures=("Qwen2ForCausalLM",),
    model_type="qwen2",
    constants={"add_qkv_bias": True},
    layer=(*NORMS, *ATTENTION, QKV_BIAS, *DENSE_MLP),
)
QWEN3 = replace(
    LLAMA,
    ids=("qwen3",),
    architectures=("Qwen3ForCausalLM",),
    model_type="qwen3",
    constants={"qk_layernorm": True},
    layer=(*NORMS, *ATTENTION, *QK_NORM, *DENSE_MLP),
)
QWEN2_MOE = replace(
    QWEN25,
    ids=("qwen2-moe",),
    architectures=("Qwen2MoeForCausalLM",),
    model_type="qwen2_moe",
    fields=(*_MOE, *SHARED_BY_SIZE),
    constants={"add_qkv_bias": True, "shared_expert_gate": True},
    layer=(*QWEN25.layer, *router(), *experts(), *GATED_SHARED_EXPERT),
)
QWEN3_MOE = replace(
    QWEN3,
    ids=("qwen3-moe",),
    architectures=("Qwen3MoeForCausalLM",),
    model_type="qwen3_moe",
    fields=_MOE,
    layer=(*QWEN3.layer, *router(), *experts()),
)
