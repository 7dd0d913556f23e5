"""From the arguments of a run to megatron-core's configuration of its model."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from mindspeed_llm.core import layer_layout
from mindspeed_llm.core.config import LlmConfig
from mindspeed_llm.errors import UserError

# Rope type -> argument -> key of a rope scaling in the words of transformers, and what the flag means left out.
_ROPE_WORDS: dict[str, dict[str, tuple[str, Any]]] = {
    "linear": {"rope_scaling_factor": ("factor", None)},
    "llama3": {
        "rope_scaling_factor": ("factor", None),
        "low_freq_factor": ("low_freq_factor", 1.0),
        "high_freq_factor": ("high_freq_factor", 4.0),
        "original_max_position_embeddings": ("original_max_position_embeddings", 8192),
    },
    "yarn": {
        "rope_scaling_factor": ("factor", None),
        "rope_scaling_original_max_position_embeddings": ("original_max_position_embeddings", None),
        "beta_fast": ("beta_fast", None),
        "beta_slow": ("beta_slow", None),
        "rope_scaling_mscale": ("mscale", None),
        "rope_scaling_mscale_all_dim": ("mscale_all_dim", None),
        "rope_scaling_attention_factor": ("attention_factor", None),
    },
}


def transformer_config(args: Namespace) -> LlmConfig:
    """The configuration that arguments (validated, see `training.arguments`) describe.

    Raises:
        UserError: lists of layers that do not fit the number of layers.
    """
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    return LlmConfig(
        **_sizes(args),
        **_parallelism(args, dtype),
        # megatron-core refuses its own default where sequences vary in length, also without experts.
        **(_moe(args) if args.num_experts else {"moe_token_dispatcher_type": "alltoall"}),
        **_recompute(args),
        **_layers(args),
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        qk_layernorm=args.qk_layernorm,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        bias_activation_fusion=False,
        use_te_activation_func=args.use_fused_swiglu,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        attention_softmax_in_fp32=args.attention_softmax_in_fp32,
        init_method_std=args.init_method_std,
        window_size=(args.sliding_window - 1, 0) if args.sliding_window else None,
        window_attn_skip_freq=_windowed_positions(args) if args.sliding_window else None,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=dtype,
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        deterministic_mode=args.deterministic_mode,
        vocab_size=args.vocab_size,
        flash_attention=args.use_flash_attn,
        fused_rmsnorm=args.use_fused_rmsnorm,
        fused_swiglu=args.use_fused_swiglu,
        overlapped_linear_chunks=args.coc_parallel_num if args.use_ascend_coc and args.coc_mode in (-1, 2) else 1,
        rope_scaling=_rope_scaling(args),
        noop_layers=layer_layout.noop_layers(args),
    )


def _sizes(args: Namespace) -> dict[str, Any]:
    return {
        "num_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "ffn_hidden_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "num_query_groups": args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        "kv_channels": args.kv_channels,
    }


def _parallelism(args: Namespace, dtype: torch.dtype) -> dict[str, Any]:
    virtual = args.virtual_pipeline_model_parallel_size
    # Without virtual stages there is nothing that a transfer could overlap with.
    overlap = args.overlap_p2p_comm and virtual is not None
    return {
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual,
        "microbatch_group_size_per_vp_stage": args.microbatch_group_size_per_vp_stage,
        "context_parallel_size": args.context_parallel_size,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
        "sequence_parallel": args.sequence_parallel,
        "pipeline_dtype": dtype,
        "overlap_p2p_comm": overlap,
        "batch_p2p_comm": not overlap,
        # Only then stages tell each other shapes, which takes a message.
        "variable_seq_lengths": args.variable_seq_lengths and args.pipeline_model_parallel_size > 1,
    }


def _moe(args: Namespace) -> dict[str, Any]:
    return {
        "num_moe_experts": args.num_experts,
        "moe_layer_freq": layer_layout.moe_pattern(args),
        "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": args.shared_expert_gate,
        "moe_shared_expert_overlap": args.moe_shared_expert_overlap,
        "moe_router_topk": args.moe_router_topk,
        "moe_router_load_balancing_type": args.moe_router_load_balancing_type,
        "moe_router_score_function": args.moe_router_score_function,
        # Softmax over the chosen experts alone is the same as over all and then normalised.
        "moe_router_pre_softmax": not args.norm_topk_prob,
        "moe_router_topk_scaling_factor": args.moe_router_topk_scaling_factor,
        "moe_router_num_groups": args.moe_router_num_groups,
        "moe_router_group_topk": args.moe_router_group_topk,
        "moe_router_enable_expert_bias": args.moe_router_enable_expert_bias,
        # megatron-core moves the bias, which is no parameter, whether or not anything else of a router is trained.
        "moe_router_bias_update_rate": 0.0 if args.lora_target_modules else args.moe_router_bias_update_rate,
        "moe_router_dtype": args.moe_router_dtype,
        "moe_aux_loss_coeff": args.moe_aux_loss_coeff,
        "moe_z_loss_coeff": args.moe_z_loss_coeff,
        "moe_token_dispatcher_type": args.moe_token_dispatcher_type,
        "moe_expert_capacity_factor": args.moe_expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": args.moe_pad_expert_input_to_capacity,
        "moe_token_drop_policy": args.moe_token_drop_policy,
        "moe_grouped_gemm": args.moe_grouped_gemm,
        "moe_permute_fusion": False,
    }


def _layers(args: Namespace) -> dict[str, Any]:
    # Distributed checkpoints name each layer, whatever kinds of layers there are and where: one written with noop
    # layers, or with experts in some layers only, is like any other.
    return {"hetereogenous_dist_checkpoint": True} | layer_layout.config_fields(args)


def _recompute(args: Namespace) -> dict[str, Any]:
    return {
        "recompute_granularity": args.recompute_granularity,
        "recompute_method": args.recompute_method,
        "recompute_num_layers": args.recompute_num_layers,
        "recompute_modules": None if args.recompute_modules is None else list(args.recompute_modules),
        "distribute_saved_activations": args.distribute_saved_activations,
    }


def _rope_scaling(args: Namespace) -> dict[str, Any] | None:
    if args.rope_scaling_type is None:
        return None
    words = {}
    for name, (word, default) in _ROPE_WORDS[args.rope_scaling_type].items():
        given = getattr(args, name)
        words[word] = default if given is None else given
    return {"rope_type": args.rope_scaling_type} | {word: value for word, value in words.items() if value is not None}


def _windowed_positions(args: Namespace) -> list[int]:
    """For each position 1 where its layer sees a sliding window only."""
    skip = args.window_attn_skip_freq
    if isinstance(skip, Sequence):
        if len(skip) != args.num_layers:
            raise UserError(
                f"--window-attn-skip-freq has {len(skip)} entries; expected one for each of --num-layers "
                f"{args.num_layers}, noop layers included"
            )
        return list(skip)
    layers = range(layer_layout.num_real_layers(args))
    kinds = [int(skip is None or (layer + 1) % skip != 0) for layer in layers]
    return layer_layout.at_positions(kinds, args, noop=0)
