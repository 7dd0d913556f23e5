"""Phi 3 and 3.5: query, key and value in one matrix, gate and up in another. Phi-3.5-MoE: biases everywhere."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    ATTENTION,
    ATTENTION_BIASES,
    LAST,
    NORMS,
    PACKED_MLP,
    PROJECTION,
    experts,
    packed_qkv,
    router,
)
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.families.settings import (
    ACTIVATION,
    ATTENTION_BIAS,
    MLP,
    ROTARY,
    SIZES,
    heads,
    moe,
    norm,
    rotary,
    sliding_window,
)
from mindspeed_llm.tasks.checkpoint.fields import Field
from mindspeed_llm.tasks.checkpoint.rules import WHOLE, Vocabulary
from mindspeed_llm.tasks.checkpoint.tables import Entry, entry, hf

PHI35 = replace(
    LLAMA,
    ids=("phi3.5", "phi3"),
    architectures=("Phi3ForCausalLM",),
    model_type="phi3",
    models="Phi 3, Phi 3.5 mini, Phi 4",
    fields=(*SIZES, *norm(1e-5), *ROTARY, *heads(), MLP, ACTIVATION, sliding_window()),
    layer=(*NORMS, PROJECTION, packed_qkv("self_attn.qkv_proj.weight"), *PACKED_MLP),
)


def _bias(item: Entry) -> Entry:
    """The bias that a norm has beside its weight."""
    [weight] = item.sources
    return replace(
        item, mg=item.mg.replace("weight", "bias"), sources=(hf(weight.name.replace("weight", "bias"), weight.shape),)
    )


PHI35_MOE = replace(
    LLAMA,
    ids=("phi3.5-moe",),
    architectures=("PhiMoEForCausalLM", "PhimoeForCausalLM"),
    model_type="phimoe",
    models="Phi-3.5-MoE",
    fields=(
        *(*SIZES, *norm(1e-5), *rotary(1e6), *heads(), ACTIVATION, sliding_window(), *ATTENTION_BIAS),
        Field(mg="add_output_layer_bias", hf=("lm_head_bias",), default=False),
        *moe("num_local_experts", "intermediate_size"),
        # Its two experts are chosen one after the other, each by a softmax over those within reach of the best.
        Field(mg="moe_router_score_function", default="softmax"),
        Field(mg="moe_router_load_balancing_type", default="sparsemixer_topk"),
        Field(mg="moe_input_jitter_eps", hf=("input_jitter_noise",)),
        Field(mg="moe_router_jitter_eps", hf=("router_jitter_noise",), default=0.01),
        Field(mg="moe_aux_loss_coeff", hf=("router_aux_loss_coef",)),
    ),
    constants={"normalization": "LayerNorm"},
    layer=(
        *(*NORMS, *(_bias(norm) for norm in NORMS), *ATTENTION, *ATTENTION_BIASES),
        *router("block_sparse_moe.gate.weight"),
        *experts("block_sparse_moe.experts.{expert}.", gate="w1", up="w3", down="w2"),
    ),
    last=(
        *LAST,
        entry("decoder.final_layernorm.bias", hf("model.norm.bias", "hidden"), rule=WHOLE),
        entry("output_layer.bias", hf("lm_head.bias", "vocab"), rule=Vocabulary(), when="add_output_layer_bias"),
    ),
)
