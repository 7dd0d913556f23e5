"""DeepSeek V2, V2-Lite, V3 and V3.2: latent attention, shared experts, multi-token prediction, a sparse indexer."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families import settings
from mindspeed_llm.tasks.checkpoint.families.blocks import (
    DENSE_MLP,
    FIRST,
    INDEXER,
    LAST,
    LATENT_ATTENTION,
    MTP,
    MTP_COPIES,
    MTP_EMBEDDING,
    NORMS,
    ROTARY_BUFFERS,
    SHARED_EXPERTS,
    TIED_HEAD,
    experts,
    router,
)
from mindspeed_llm.tasks.checkpoint.families.settings import (
    ACTIVATION,
    GROUPS,
    LATENT,
    MLP,
    MTP_LAYERS,
    ROTARY,
    SIZES,
    first_dense,
    moe,
    norm,
    shared_by_count,
    sigmoid_router,
    softmax_router,
)
from mindspeed_llm.tasks.checkpoint.fields import Field, Only
from mindspeed_llm.tasks.checkpoint.tables import Family

_SCALED_GROUPS = (*GROUPS, Field(mg="moe_router_topk_scaling_factor", hf=("routed_scaling_factor",), default=1.0))
_EXPERTS = (*moe("n_routed_experts"), *shared_by_count())

DEEPSEEK2_LITE = Family(
    ids=("deepseek2-lite", "deepseek2"),
    architectures=("DeepseekV2ForCausalLM",),
    model_type="deepseek_v2",
    models="DeepSeek-V2, V2-Lite, V2.5",
    fields=(
        *(*SIZES, *norm(), *ROTARY, *LATENT, MLP, ACTIVATION),
        *(*first_dense(), *_EXPERTS, *softmax_router(), *_SCALED_GROUPS),
        Field(
            mg="moe_router_load_balancing_type",
            hf=("topk_method",),
            values={"greedy": "softmax_topk", "group_limited_greedy": "group_limited_greedy"},
            default="softmax_topk",
        ),
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
    models="DeepSeek-V3, V3.1, R1, Kimi K2",
    fields=(
        *(*SIZES, *norm(), *ROTARY, *LATENT, MLP, ACTIVATION),
        *(*first_dense(3), *_EXPERTS, *sigmoid_router(scale_default=2.5), *GROUPS, MTP_LAYERS),
        # Rotary positions turn neighbouring values of a head.
        Only(hf="rope_interleave", holds=lambda value, _: value is True, expected="true"),
    ),
    layer=(
        *(*NORMS, *LATENT_ATTENTION, *DENSE_MLP, *SHARED_EXPERTS, *experts()),
        *router(bias="mlp.gate.e_score_correction_bias"),
    ),
    last=(*LAST, *MTP_EMBEDDING),
    mtp=MTP,
    mtp_copies=MTP_COPIES,
)
DEEPSEEK32 = replace(
    DEEPSEEK3,
    ids=("deepseek32",),
    architectures=("DeepseekV32ForCausalLM",),
    model_type="deepseek_v32",
    models="DeepSeek-V3.2",
    fields=(*DEEPSEEK3.fields, *settings.INDEXER),
    layer=(*DEEPSEEK3.layer, *INDEXER),
)
