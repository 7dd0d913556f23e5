"""Floating point operations of a model, by the sizes that the arguments say."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.observability.throughput import flops_per_token


def flops_per_sample(args: Namespace) -> float:
    """Forward and backward of one sample of `--seq-length` tokens; see `throughput.flops_per_token` for the formula.

    Noop layers cost nothing; of experts those count that a token goes through. A sample of --stage dpo is two rows, and
    the reference's forward comes on top, half of what backward takes.
    """
    layers = args.num_layers - len(args.noop_layers or ())
    active = sum(_layer(args, moe=moe) for moe in _kinds(args)) + args.hidden_size * args.vocab_size
    per_token = flops_per_token(
        num_params_active=active,
        num_layers=layers,
        hidden=args.hidden_size,
        num_heads=args.num_attention_heads,
        head_dim=args.kv_channels,
        seq_len=args.seq_length,
    )
    rows = 2 * (1 + 1 / 3) if args.stage == "dpo" else 1
    return per_token * args.seq_length * rows


def _kinds(args: Namespace) -> list[bool]:
    """For each layer that computes, whether it has experts."""
    pattern = args.moe_layer_pattern if args.num_experts else 0
    noops = set(args.noop_layers or ())
    return [
        bool(pattern[position]) if isinstance(pattern, list) else bool(pattern)
        for position in range(args.num_layers)
        if position not in noops
    ]


def _layer(args: Namespace, *, moe: bool) -> int:
    """Weights in matrix products that a token meets in a layer."""
    hidden, width = args.hidden_size, args.num_attention_heads * args.kv_channels
    attention = hidden * (width + 2 * args.num_query_groups * args.kv_channels) + width * hidden
    matrices = 3 if args.swiglu else 2
    if not moe:
        return attention + matrices * hidden * args.ffn_hidden_size
    inner = args.moe_router_topk * args.moe_ffn_hidden_size + (args.moe_shared_expert_intermediate_size or 0)
    return attention + matrices * hidden * inner + hidden * args.num_experts
