"""Gemma 2 and 3: norms before and after both halves of a layer, embeddings always tied, most layers with a window."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    ATTENTION,
    ATTENTION_BIASES,
    DENSE_MLP,
    IMAGE_PARTS,
    INPUT_NORM,
    QK_NORM,
    ROTARY_BUFFERS,
    mlp_norm,
)
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.families.settings import (
    ACTIVATION,
    ATTENTION_BIAS,
    MLP,
    ROTARY,
    SIZES,
    TIED,
    heads,
    norm,
    rotary,
    sliding_window,
    windows,
)
from mindspeed_llm.tasks.checkpoint.fields import Field, Only, changed, nested, without
from mindspeed_llm.tasks.checkpoint.rules import WHOLE
from mindspeed_llm.tasks.checkpoint.tables import entry, hf

_COMMON = (
    *(*without(SIZES, TIED.mg), TIED, MLP, *ATTENTION_BIAS, *norm(), *heads(256)),
    replace(ACTIVATION, hf=("hidden_activation", "hidden_act"), default="gelu_pytorch_tanh"),
    Field(mg="query_pre_attn_scalar", hf=("query_pre_attn_scalar",), default=256),
    sliding_window(4096),
)
# Embeddings are scaled, and norms multiply by one plus their weight.
_CONSTANTS = {"post_norm": True, "add_rmsnorm_offset": True, "input_embeds_norm": True}

GEMMA2 = replace(
    LLAMA,
    ids=("gemma2",),
    architectures=("Gemma2ForCausalLM",),
    model_type="gemma2",
    models="Gemma 2",
    fields=(
        *(*_COMMON, *ROTARY, windows(every=2)),
        Field(mg="attn_logit_softcapping", hf=("attn_logit_softcapping",), default=50.0, nullable=True),
        Field(mg="output_logit_softcapping", hf=("final_logit_softcapping",), default=30.0, nullable=True),
    ),
    constants=_CONSTANTS,
    layer=(
        *(*INPUT_NORM, *ATTENTION, *ATTENTION_BIASES, *DENSE_MLP, *mlp_norm("pre_feedforward_layernorm.weight")),
        entry("post_attn_norm.weight", hf("post_attention_layernorm.weight", "hidden"), rule=WHOLE),
        entry("post_mlp_layernorm.weight", hf("post_feedforward_layernorm.weight", "hidden"), rule=WHOLE),
    ),
)
_ALL_OPTIONAL = _COMMON
# The configurations of models with images leave most of it out.
for _name, _default in {"num_attention_heads": 8, "num_query_groups": 4, "vocab_size": 262208}.items():
    _ALL_OPTIONAL = changed(_ALL_OPTIONAL, _name, default=_default, required=False)

GEMMA3 = replace(
    GEMMA2,
    ids=("gemma3",),
    architectures=("Gemma3ForCausalLM",),
    model_type="gemma3_text",
    models="Gemma 3 (the language model)",
    fields=(
        *_ALL_OPTIONAL,
        *(*rotary(1e6), windows(every=6)),
        Field(
            mg="rope_local_base_freq",
            hf=(lambda c: nested(c, "rope_parameters.sliding_attention.rope_theta"), "rope_local_base_freq"),
            default=10000.0,
        ),
        Only(hf="use_bidirectional_attention", holds=lambda value, _: value is False, expected="false"),
        Field(mg="attn_logit_softcapping", hf=("attn_logit_softcapping",)),
        Field(mg="output_logit_softcapping", hf=("final_logit_softcapping",)),
    ),
    constants=_CONSTANTS | {"qk_layernorm": True},
    layer=(*GEMMA2.layer, *QK_NORM),
    dropped=(*ROTARY_BUFFERS, *IMAGE_PARTS),
)
