"""MiniMax M2: all layers MoE, query and key norms over all heads at once."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    ATTENTION,
    HEADS,
    NORM,
    NORMS,
    ROTARY,
    SIZES,
    experts,
    moe_fields,
    router,
)
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.rules import WHOLE
from mindspeed_llm.tasks.checkpoint.tables import Limit, entry, hf

MINIMAX_M2 = replace(
    LLAMA,
    ids=("minimax_m2",),
    architectures=("MiniMaxM2ForCausalLM",),
    model_type="minimax_m2",
    fields=(*SIZES, *NORM, *ROTARY, *HEADS, *moe_fields("num_local_experts", "intermediate_size")),
    constants={"qk_layernorm": True},
    layer=(
        *(*NORMS, *ATTENTION),
        entry("self_attention.q_layernorm.weight", hf("self_attn.q_norm.weight", "attention"), rule=WHOLE),
        entry("self_attention.k_layernorm.weight", hf("self_attn.k_norm.weight", "keys"), rule=WHOLE),
        *router("block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias"),
        *experts("block_sparse_moe.experts.{expert}.", gate="w1", up="w3", down="w2"),
    ),
    dimensions={"keys": lambda s: s["num_query_groups"] * s["kv_channels"]},
    limits=(
        Limit(
            attribute="tp",
            most=1,
            reason="its query and key norms run over all heads, which no tensor parallel rank has",
        ),
    ),
)
