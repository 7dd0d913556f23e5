"""Phi 3 and 3.5: query, key and value in one matrix, gate and up in another."""

from dataclasses import replace

from mindspeed_llm.tasks.checkpoint.families.blocks import NORMS, PROJECTION
from mindspeed_llm.tasks.checkpoint.families.llama import LLAMA
from mindspeed_llm.tasks.checkpoint.rules import COLUMNS, ROWS, GroupedQkv
from mindspeed_llm.tasks.checkpoint.tables import Hf, entry, hf


def _heads(start: str, stop: str) -> Hf:
    """A run of heads of the packed projection, which holds all query heads, all key heads, all value heads."""
    return hf("self_attn.qkv_proj.weight", "(all_heads head_dim) hidden", {0: (start, stop)})


def _half(index: int) -> Hf:
    """gate (0) or up (1)."""
    return hf("mlp.gate_up_proj.weight", "(2 ffn) hidden", {0: index})


PHI35 = replace(
    LLAMA,
    ids=("phi3.5", "phi3"),
    architectures=("Phi3ForCausalLM",),
    model_type="phi3",
    layer=(
        *(*NORMS, PROJECTION),
        entry(
            "self_attention.linear_qkv.weight",
            *(_heads("0", "key_start"), _heads("key_start", "value_start"), _heads("value_start", "all_heads")),
            rule=GroupedQkv(),
        ),
        entry("mlp.linear_fc1.weight", _half(0), _half(1), rule=ROWS),
        entry("mlp.linear_fc2.weight", hf("mlp.down_proj.weight", "hidden ffn"), rule=COLUMNS),
    ),
)
