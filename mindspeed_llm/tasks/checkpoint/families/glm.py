"""GLM 4, GLM-4.5 (and Air), GLM-5."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families import settings
from mindspeed_llm.tasks.checkpoint.families.blocks import (
    ATTENTION,
    DENSE_MLP,
    INPUT_NORM,
    LAST,
    MTP,
    MTP_COPIES,
    MTP_EMBEDDING,
    NORMS,
    PACKED_MLP,
    QK_NORM,
    QKV_BIAS,
    SHARED_EXPERTS,
    experts,
    mlp_norm,
    mtp_of_main_embedding,
    router,
)
from mindspeed_llm.tasks.checkpoint.families.deepseek import DEEPSEEK32
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.families.settings import (
    ACTIVATION,
    GROUPS,
    LATENT,
    MLP,
    MTP_LAYERS,
    ROTARY,
    SIZES,
    first_dense,
    heads,
    moe,
    norm,
    rotary,
    shared_by_count,
    sigmoid_router,
)
from mindspeed_llm.tasks.checkpoint.fields import Config, Field
from mindspeed_llm.tasks.checkpoint.rules import WHOLE
from mindspeed_llm.tasks.checkpoint.tables import entry, hf

GLM4 = replace(
    LLAMA,
    ids=("glm4", "glm4_9b"),
    architectures=("Glm4ForCausalLM",),
    model_type="glm4",
    models="GLM-4-0414, GLM-Z1",
    fields=(
        *(*SIZES, *norm(1.5625e-07), *rotary(part=0.5), *heads(128), MLP, ACTIVATION),
        Field(mg="add_qkv_bias", hf=("attention_bias",), default=True),
    ),
    # Its rotary positions turn neighbouring values of a head.
    constants={"rotary_interleaved": True, "post_norm": True},
    layer=(
        *(*INPUT_NORM, *ATTENTION, QKV_BIAS, *mlp_norm(), *PACKED_MLP),
        entry("post_attn_norm.weight", hf("post_self_attn_layernorm.weight", "hidden"), rule=WHOLE),
        entry("post_mlp_layernorm.weight", hf("post_mlp_layernorm.weight", "hidden"), rule=WHOLE),
    ),
)
GLM45 = replace(
    LLAMA,
    ids=("glm45-air", "glm45"),
    architectures=("Glm4MoeForCausalLM",),
    model_type="glm4_moe",
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
    fields=(
        *(*SIZES, *norm(1e-5), *rotary(part=0.5), *heads(), MLP, ACTIVATION),
        *(*first_dense(1), *moe("n_routed_experts"), *shared_by_count(), *sigmoid_router(), *GROUPS, MTP_LAYERS),
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


def _indexer_types(config: Config) -> list[str] | None:
    """Which layers have an indexer of their own ("full"), as transformers derives it from a pattern or a frequency."""
    pattern, frequency = config.get("index_topk_pattern"), config.get("index_topk_freq")
    if pattern is not None:
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if frequency is None:
        return None
    offset = config.get("index_skip_topk_offset", 2)
    return [
        "shared" if max(layer - offset + 1, 0) % max(frequency, 1) else "full"
        for layer in range(config["num_hidden_layers"])
    ]


GLM5 = replace(
    DEEPSEEK32,
    ids=("glm5", "glm52"),
    architectures=("GlmMoeDsaForCausalLM",),
    model_type="glm_moe_dsa",
    models="GLM-5, GLM-5.1, GLM-5.2",
    fields=(
        *(*SIZES, *norm(1e-5), *ROTARY, *LATENT, MLP, ACTIVATION),
        *(*first_dense(3), *moe("n_routed_experts"), *shared_by_count(), *sigmoid_router(scale_default=2.5), *GROUPS),
        *(MTP_LAYERS, *settings.INDEXER),
        Field(mg="indexer_types", hf=("indexer_types", _indexer_types), per_layer=True),
    ),
    # Its MTP layer has no copies of its own; where a checkpoint has them all the same, they are dropped by name.
    last=(*LAST, *mtp_of_main_embedding()),
    mtp_copies=tuple(replace(copy, written=False) for copy in MTP_COPIES),
)
