"""GLM-4.5 and GLM-4.5-Air."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    ATTENTION,
    DENSE_FIELDS,
    DENSE_MLP,
    FIRST_DENSE,
    LAST,
    MTP,
    MTP_COPIES,
    MTP_EMBEDDING,
    MTP_LAYERS,
    NORMS,
    QK_NORM,
    QKV_BIAS,
    SHARED_BY_COUNT,
    SHARED_EXPERTS,
    experts,
    moe_fields,
    router,
)
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.tables import Field

GLM45 = replace(
    LLAMA,
    ids=("glm45-air", "glm45"),
    architectures=("Glm4MoeForCausalLM",),
    model_type="glm4_moe",
    fields=(
        *(*DENSE_FIELDS, *FIRST_DENSE, *moe_fields("n_routed_experts"), *SHARED_BY_COUNT, *MTP_LAYERS),
        Field(mg="qk_layernorm", hf=("use_qk_norm",), default=False),
        Field(mg="add_qkv_bias", hf=("attention_bias",), default=False),
    ),
    layer=(
        *(*NORMS, *ATTENTION, QKV_BIAS, *(replace(norm, when="qk_layernorm") for norm in QK_NORM)),
        *(*DENSE_MLP, *experts(), *SHARED_EXPERTS, *router(bias="mlp.gate.e_score_correction_bias")),
    ),
    last=(*LAST, *MTP_EMBEDDING),
    mtp=MTP,
    mtp_copies=MTP_COPIES,
)
