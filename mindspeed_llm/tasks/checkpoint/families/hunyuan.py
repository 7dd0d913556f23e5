"""Hunyuan 3."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    ATTENTION,
    DENSE_MLP,
    LAST,
    NORMS,
    QK_NORM,
    experts,
    mtp_layer,
    mtp_of_main_embedding,
    router,
    shared_experts,
)
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.families.settings import (
    ACTIVATION,
    MLP,
    MLP_LAYER_TYPES,
    MTP_LAYERS,
    SIZES,
    first_dense,
    heads,
    moe,
    norm,
    rotary,
    shared_by_count,
    sigmoid_router,
)

HUNYUAN3 = replace(
    LLAMA,
    ids=("HYV3",),
    architectures=("HYV3ForCausalLM",),
    model_type="hy_v3",
    models="Hunyuan 3 (Hy3)",
    fields=(
        *(*SIZES, *norm(1e-5), *rotary(11158840.0), *heads(128), MLP, ACTIVATION),
        *(*first_dense(1), MLP_LAYER_TYPES, *moe("num_experts"), *shared_by_count("num_shared_experts")),
        *(*sigmoid_router(scale="router_scaling_factor", scale_default=2.826), MTP_LAYERS),
    ),
    constants={"qk_layernorm": True},
    layer=(
        *(*NORMS, *ATTENTION, *QK_NORM, *DENSE_MLP),
        *router("mlp.router.gate.weight", "mlp.expert_bias"),
        *(*experts(), *shared_experts("mlp.shared_mlp.")),
    ),
    last=(*LAST, *mtp_of_main_embedding()),
    mtp=mtp_layer("final_layernorm.weight"),
)
