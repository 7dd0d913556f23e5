"""Llama 2, 3 and 3.x, and everything else that has their names: the plain decoder."""

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    ATTENTION,
    DENSE_FIELDS,
    DENSE_MLP,
    FIRST,
    LAST,
    NORMS,
    ROTARY_BUFFERS,
    TIED_HEAD,
)
from mindspeed_llm.tasks.checkpoint.tables import Family

LLAMA = Family(
    ids=("llama2", "llama3"),
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    fields=DENSE_FIELDS,
    first=FIRST,
    layer=(*NORMS, *ATTENTION, *DENSE_MLP),
    last=LAST,
    copies=TIED_HEAD,
    dropped=ROTARY_BUFFERS,
)
