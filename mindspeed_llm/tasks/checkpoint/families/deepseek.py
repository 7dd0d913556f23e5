"""DeepSeek V2, V2-Lite and V3: latent attention, shared experts, and multi-token prediction in V3."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    DENSE_MLP,
    FIRST,
    FIRST_DENSE,
    LAST,
    LATENT_ATTENTION,
    LATENT_FIELDS,
    MLP,
    MTP,
    MTP_COPIES,
    MTP_EMBEDDING,
    MTP_LAYERS,
    NORM,
    NORMS,
    ROTARY,
    ROTARY_BUFFERS,
    SHARED_BY_COUNT,
    SHARED_EXPERTS,
    SIZES,
    TIED_HEAD,
    experts,
    moe_fields,
    router,
)
from mindspeed_llm.tasks.checkpoint.tables import Family

DEEPSEEK2_LITE = Family(
    ids=("deepseek2-lite", "deepseek2"),
    architectures=("DeepseekV2ForCausalLM",),
    model_type="deepseek_v2",
    fields=(
        *(*SIZES, *NORM, *ROTARY, *LATENT_FIELDS, *MLP),
        *(*FIRST_DENSE, *moe_fields("n_routed_experts"), *SHARED_BY_COUNT),
    ),
    constants={"multi_latent_attention": True, "qk_layernorm": True},
    first=FIRST,
    layer=(*NORMS, *LATENT_ATTENTION, *DENSE_MLP, *router(), *experts(), *SHARED_EXPERTS),
    last=LAST,
    copies=TIED_HEAD,
    dropped=ROTARY_BUFFERS,
)
DEEPSEEK3 = replace(
    DEEPSEEK2_LITE,
    ids=("deepseek3",),
    architectures=("DeepseekV3ForCausalLM",),
    model_type="deepseek_v3",
    fields=(*DEEPSEEK2_LITE.fields, *MTP_LAYERS),
    layer=(
        *(*NORMS, *LATENT_ATTENTION, *DENSE_MLP, *SHARED_EXPERTS, *experts()),
        *router(bias="mlp.gate.e_score_correction_bias"),
    ),
    last=(*LAST, *MTP_EMBEDDING),
    mtp=MTP,
    mtp_copies=MTP_COPIES,
)
