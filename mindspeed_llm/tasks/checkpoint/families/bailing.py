"""Ling and Ring 2.0 (Bailing MoE V2): names of their own for the parts of a layer that others share."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    DENSE_MLP,
    HEAD,
    NORMS,
    SHARED_EXPERTS,
    embedding,
    experts,
    final_norm,
    mtp_layer,
    mtp_of_main_embedding,
    output,
    packed_qkv,
    router,
    tied_head,
)
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.families.settings import (
    ACTIVATION,
    GROUPS,
    MLP,
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
from mindspeed_llm.tasks.checkpoint.fields import Field
from mindspeed_llm.tasks.checkpoint.rules import COLUMNS, WHOLE
from mindspeed_llm.tasks.checkpoint.tables import entry, hf

_EMBEDDING = hf("model.word_embeddings.weight", "vocab hidden")

BAILING = replace(
    LLAMA,
    ids=("bailing_mini",),
    architectures=("BailingMoeV2ForCausalLM",),
    model_type="bailing_moe_v2",
    models="Ling 2.0 and Ring 2.0 (mini, flash, 1T)",
    no_class="transformers 5 has Bailing's hybrid models only; needs the model's own code (trust_remote_code)",
    fields=(
        *(*SIZES, *norm(), *rotary(600000.0, part=0.5), *heads(), MLP, ACTIVATION),
        *(*first_dense(), *moe("num_experts"), *shared_by_count("num_shared_experts")),
        *(*sigmoid_router(scale_default=2.5), *GROUPS, MTP_LAYERS),
        Field(mg="qk_layernorm", hf=("use_qk_norm",), default=True),
    ),
    first=embedding(_EMBEDDING),
    layer=(
        *(*NORMS, packed_qkv("attention.query_key_value.weight")),
        entry("self_attention.linear_proj.weight", hf("attention.dense.weight", "hidden attention"), rule=COLUMNS),
        *(
            entry(f"self_attention.{mg}.weight", hf(f"attention.{name}.weight", "head_dim"), rule=WHOLE)
            for mg, name in (("q_layernorm", "query_layernorm"), ("k_layernorm", "key_layernorm"))
        ),
        *(*DENSE_MLP, *router(bias="mlp.gate.expert_bias"), *experts(), *SHARED_EXPERTS),
    ),
    last=(*final_norm(), *output(_EMBEDDING, HEAD), *mtp_of_main_embedding(_EMBEDDING)),
    copies=tied_head(_EMBEDDING),
    mtp=mtp_layer("final_layernorm.weight"),
)
