"""MiniMax M2: all layers MoE, query and key norms over all heads at once."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    ATTENTION,
    NORMS,
    experts,
    router,
)
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.families.settings import (
    ACTIVATION,
    SIZES,
    heads,
    moe,
    norm,
    of_rope_parameters,
    rotary,
    sigmoid_router,
)
from mindspeed_llm.tasks.checkpoint.fields import Config, Field, Written, changed, without
from mindspeed_llm.tasks.checkpoint.rules import WHOLE
from mindspeed_llm.tasks.checkpoint.tables import Limit, entry, hf


def _turning_part(config: Config) -> float | None:
    """Its own way to say which part of a head turns: the number of values."""
    return config["rotary_dim"] / config["head_dim"] if config.get("rotary_dim") else None


MINIMAX_M2 = replace(
    LLAMA,
    ids=("minimax_m2",),
    architectures=("MiniMaxM2ForCausalLM",),
    model_type="minimax_m2",
    models="MiniMax-M2, M2.1, M2.5",
    fields=(
        *(*SIZES, *norm(), *heads(128), ACTIVATION),
        *changed(
            rotary(5e6),
            "partial_rotary_factor",
            hf=(of_rope_parameters("partial_rotary_factor"), "partial_rotary_factor", _turning_part),
        ),
        Written(hf="rotary_dim", value=lambda s: int(s["kv_channels"] * s["partial_rotary_factor"])),
        *(*moe("num_local_experts", "intermediate_size"), *without(sigmoid_router(), "moe_router_topk_scaling_factor")),
        Field(mg="moe_aux_loss_coeff", hf=("router_aux_loss_coef",)),
    ),
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
