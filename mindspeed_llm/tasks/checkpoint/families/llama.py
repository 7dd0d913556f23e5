"""Llama and everything else that has its names: the plain decoder."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import (
    ATTENTION,
    ATTENTION_BIASES,
    DENSE_MLP,
    FIRST,
    LAST,
    MLP_BIASES,
    NORMS,
    ROTARY_BUFFERS,
    TIED_HEAD,
)
from mindspeed_llm.tasks.checkpoint.families.settings import ATTENTION_BIAS, DENSE, MLP_BIAS
from mindspeed_llm.tasks.checkpoint.fields import Field, changed
from mindspeed_llm.tasks.checkpoint.tables import Family

LLAMA = Family(
    ids=("llama2", "llama3"),
    architectures=("LlamaForCausalLM",),
    model_type="llama",
    models="Llama 2, 3, 3.1, 3.2, 3.3",
    fields=(*DENSE, *ATTENTION_BIAS, MLP_BIAS),
    first=FIRST,
    layer=(*NORMS, *ATTENTION, *ATTENTION_BIASES, *DENSE_MLP, *MLP_BIASES),
    last=LAST,
    copies=TIED_HEAD,
    dropped=ROTARY_BUFFERS,
)
INTERNLM3 = replace(
    LLAMA,
    ids=("internlm3",),
    architectures=("InternLM3ForCausalLM",),
    model_type="internlm3",
    models="InternLM 3",
    fields=(
        *changed(DENSE, "norm_epsilon", default=1e-5),
        Field(mg="add_qkv_bias", hf=("qkv_bias", "attention_bias"), default=False),
        # One key for all other biases; transformers writes it under the names of Llama.
        Field(mg="add_dense_bias", hf=("bias", "mlp_bias"), default=False),
        Field(mg="add_mlp_bias", hf=("bias", "mlp_bias"), default=False, written=False),
    ),
)
SEED_OSS = replace(
    LLAMA,
    ids=("seed-oss",),
    architectures=("SeedOssForCausalLM",),
    model_type="seed_oss",
    models="Seed-OSS",
    fields=(
        *DENSE,
        Field(mg="add_qkv_bias", hf=("attention_bias",), default=True),
        Field(mg="add_dense_bias", hf=("attention_out_bias",), default=False),
        MLP_BIAS,
    ),
)
