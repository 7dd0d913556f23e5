"""Gemma 2: norms before and after both halves of a layer, embeddings always tied."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    ATTENTION,
    DENSE_FIELDS,
    DENSE_MLP,
    INPUT_NORM,
    mlp_norm,
)
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.rules import WHOLE
from mindspeed_llm.tasks.checkpoint.tables import Field, entry, hf

# Checkpoints of this architecture may leave the key out: tied is its default.
_TIED = Field(mg="untie_embeddings_and_output_weights", hf=("tie_word_embeddings",), negated=True, default=False)

GEMMA2 = replace(
    LLAMA,
    ids=("gemma2",),
    architectures=("Gemma2ForCausalLM",),
    model_type="gemma2",
    fields=(*(field for field in DENSE_FIELDS if field.mg != _TIED.mg), _TIED),
    layer=(
        *(*INPUT_NORM, *ATTENTION, *DENSE_MLP, *mlp_norm("pre_feedforward_layernorm.weight")),
        entry("post_attn_norm.weight", hf("post_attention_layernorm.weight", "hidden"), rule=WHOLE),
        entry("post_mlp_layernorm.weight", hf("post_feedforward_layernorm.weight", "hidden"), rule=WHOLE),
    ),
)
