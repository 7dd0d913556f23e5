"""The layers of a decoder as megatron-core's specs, made of its parallel linears and the modules of `core`."""

from __future__ import annotations

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mindspeed_llm.core.attention import CoreAttention
from mindspeed_llm.core.config import LlmConfig
from mindspeed_llm.core.moe.grouped_experts import GroupedExperts
from mindspeed_llm.core.moe.router import Router
from mindspeed_llm.core.moe.sequential_experts import SequentialExperts
from mindspeed_llm.core.norm import LayerNorm, RMSNorm
from mindspeed_llm.core.overlapped_linears import OverlappedColumnLinear, OverlappedRowLinear
from mindspeed_llm.core.swiglu import fused_swiglu


def norm_of(config: LlmConfig) -> type:
    """The norm of a model."""
    return RMSNorm if config.normalization == "RMSNorm" else LayerNorm


def linears_of(config: LlmConfig) -> tuple[type[ColumnParallelLinear], type[RowParallelLinear]]:
    """The linear layers of a model whose outputs, and whose inputs, tensor parallel ranks have parts of."""
    if config.overlapped_linear_chunks > 1:
        return OverlappedColumnLinear, OverlappedRowLinear
    return ColumnParallelLinear, RowParallelLinear


def decoder_layer(config: LlmConfig, *, moe: bool) -> ModuleSpec:
    """One decoder layer: attention and an MLP, or experts where `moe`."""
    norm = norm_of(config)
    column, row = linears_of(config)
    head_norm = norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column,
                    core_attention=CoreAttention,
                    linear_proj=row,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=_experts(config) if moe else ModuleSpec(module=MLP, submodules=_mlp(config)),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _experts(config: LlmConfig) -> ModuleSpec:
    if config.moe_grouped_gemm:
        experts = ModuleSpec(module=GroupedExperts)
    else:
        experts = ModuleSpec(module=SequentialExperts, submodules=_mlp(config))
    shared = ModuleSpec(module=SharedExpertMLP, submodules=_mlp(config))
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(experts=experts, shared_experts=shared, router=Router),
        metainfo={"fuse_pre_mlp_layernorm": False},
    )


def _mlp(config: LlmConfig) -> MLPSubmodules:
    column, row = linears_of(config)
    return MLPSubmodules(
        linear_fc1=column,
        linear_fc2=row,
        # megatron-core builds it where the configuration says `use_te_activation_func`.
        activation_func=fused_swiglu if config.fused_swiglu else None,
    )
