"""PLM: latent attention without a low rank for queries, and an MLP of two matrices without a gate."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import LATENT_ATTENTION, NORMS
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.families.settings import LATENT, MLP, ROTARY, SIZES, TIED, norm
from mindspeed_llm.tasks.checkpoint.fields import Choice, without
from mindspeed_llm.tasks.checkpoint.rules import COLUMNS, ROWS
from mindspeed_llm.tasks.checkpoint.tables import entry, hf

PLM = replace(
    LLAMA,
    ids=("plm",),
    architectures=("PLMForCausalLM",),
    model_type="plm",
    models="PLM 1.8B",
    no_class="transformers 5 has no such model; needs the model's own code (trust_remote_code)",
    fields=(
        *(*without(SIZES, TIED.mg), TIED, *norm(), *ROTARY, *LATENT, MLP),
        Choice(hf=("hidden_act",), options={"relu2": {"squared_relu": True}}, default="relu2"),
    ),
    constants={"multi_latent_attention": True, "qk_layernorm": True},
    layer=(
        *(*NORMS, *LATENT_ATTENTION),
        entry("mlp.linear_fc1.weight", hf("mlp.up_proj.weight", "ffn hidden"), rule=ROWS),
        entry("mlp.linear_fc2.weight", hf("mlp.down_proj.weight", "hidden ffn"), rule=COLUMNS),
    ),
)
