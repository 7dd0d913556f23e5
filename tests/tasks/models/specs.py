"""Layer specs as a user may bring them with `--spec`."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mindspeed_llm.core.attention import CoreAttention
from mindspeed_llm.core.config import LlmConfig

LAYER_WITHOUT_NORMS = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear, core_attention=CoreAttention, linear_proj=RowParallelLinear
            ),
        ),
        mlp=ModuleSpec(
            module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        ),
    ),
)


def without_norms(config: LlmConfig, *, moe: bool) -> ModuleSpec:
    """The same, as a function."""
    assert not moe
    return LAYER_WITHOUT_NORMS
