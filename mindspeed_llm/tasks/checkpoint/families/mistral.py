"""Mistral, Magistral and Mixtral."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    ATTENTION,
    IMAGE_PARTS,
    NORMS,
    ROTARY_BUFFERS,
    experts,
    router,
)
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.families.settings import (
    ACTIVATION,
    DENSE,
    SIZES,
    heads,
    moe,
    norm,
    rotary,
    sliding_window,
    softmax_router,
)

MISTRAL = replace(
    LLAMA,
    ids=("mistral", "magistral"),
    architectures=("MistralForCausalLM",),
    model_type="mistral",
    models="Mistral, Mistral Small, Magistral (of models with images the language model)",
    fields=(*DENSE, sliding_window(4096)),
    dropped=(*ROTARY_BUFFERS, *IMAGE_PARTS),
)
MIXTRAL = replace(
    LLAMA,
    ids=("mixtral",),
    architectures=("MixtralForCausalLM",),
    model_type="mixtral",
    models="Mixtral 8x7B, 8x22B",
    fields=(
        *(*SIZES, *norm(1e-5), *rotary(1e6), *heads(), ACTIVATION, sliding_window()),
        *(*moe("num_local_experts", "intermediate_size"), *softmax_router(normalised=True)),
    ),
    layer=(
        *(*NORMS, *ATTENTION, *router("block_sparse_moe.gate.weight")),
        *experts("block_sparse_moe.experts.{expert}.", gate="w1", up="w3", down="w2"),
    ),
)
