"""Bytes that a rank needs, by formulas: of the state of its parameters, and of activations.

Activations follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022). Their
formula for a layer is sbh (10 + 24/t) + 5 as^2b/t bytes, and (34 sbh + 5 as^2b) / t with sequence parallelism: for
GELU, an MLP of width 4h, as many key-value heads as query heads, dropout, and 2 bytes an element. Here its terms stand
one by one, so that other widths, gated MLPs, grouped key-value heads, experts and no dropout are said as well.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from mindspeed_llm.core.layer_layout import layers_at
from mindspeed_llm.training.arguments.checks.preference import has_reference_copy
from mindspeed_llm.training.arguments.parameters import Count, Stage

_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank."""

    weights: int
    gradients: int
    optimizer: int
    """Master weights and moments."""
    activations: int

    @property
    def total(self) -> int:
        """All together: an upper bound of the peak, without what the allocator and the libraries hold besides."""
        return self.weights + self.gradients + self.optimizer + self.activations


def memory_of(stage: Stage, args: Namespace) -> Memory:
    """What a rank of a pipeline stage needs."""
    weight, gradient, state = bytes_per_parameter(args)
    state_bytes = 0
    for size, ranks in (
        (stage.trained.shared, args.data_parallel_size),
        (stage.trained.experts, expert_ranks(args)),
    ):
        local = -(-size // ranks) if args.use_distributed_optimizer else size
        state_bytes += local * state
    return Memory(
        weights=stage.count.total * weight * (2 if has_reference_copy(args) else 1),
        gradients=stage.trained.total * gradient,
        optimizer=state_bytes,
        activations=activations_of(stage, _of_rows(args)),
    )


def _of_rows(args: Namespace) -> Namespace:
    """The arguments with the rows of a micro batch for its samples: of pairs there are twice as many."""
    if args.stage != "dpo":
        return args
    return Namespace(**{**vars(args), "micro_batch_size": 2 * args.micro_batch_size})


def optimizer_bytes(count: Count, args: Namespace, *, distributed: bool) -> int:
    """The optimizer's state on a rank, spread over data-parallel ranks or not."""
    state = bytes_per_parameter(args)[2]
    if not distributed:
        return count.total * state
    return (-(-count.shared // args.data_parallel_size) + -(-count.experts // expert_ranks(args))) * state


def expert_ranks(args: Namespace) -> int:
    """The data-parallel ranks that hold the same experts."""
    if args.num_experts is None:
        return args.data_parallel_size
    model_ranks = args.expert_model_parallel_size * args.expert_tensor_parallel_size
    return args.world_size // (model_ranks * args.pipeline_model_parallel_size)


def bytes_per_parameter(args: Namespace) -> tuple[int, int, int]:
    """Bytes of a parameter, of its gradient, and of the optimizer's state for it.

    In 16 bits the state has a master copy in fp32 beside the moments; with --reuse-fp32-param the parameter is the
    upper half of it, so that only the lower half comes on top.
    """
    moments = 2 * _FP32 if args.optimizer == "adam" else _FP32
    if not (args.bf16 or args.fp16):
        return _FP32, _FP32, moments
    gradient = _FP32 if args.accumulate_allreduce_grads_in_fp32 else 2
    return 2, gradient, moments + (2 if args.reuse_fp32_param else _FP32)


def activations_of(stage: Stage, args: Namespace) -> int:
    """What all micro batches need that a stage has begun and not finished, in the schedule of 1F1B or the interleaved
    one; plus the layers that are computed again at a time. Layers with local updates keep nothing.
    """
    moe = args.moe_layer_pattern or [0] * args.num_layers
    kinds = [bool(bit) for bit, layer in zip(moe, layers_at(args), strict=True) if layer is not None]
    local = -1 if args.lu_lora_final_layer_index is None else args.lu_lora_final_layer_index
    kept, again = [], 0
    for chunk in stage.chunks:
        sizes = {layer: layer_bytes(args, moe=kinds[layer]) for _, layer in chunk.layers}
        layers = [size for layer, size in sizes.items() if layer > local]
        # Of a local layer there is no more at a time than of one that is computed again.
        again = max(again, *(size for layer, size in sizes.items() if layer <= local), 0)
        bytes_kept, bytes_again = _after_recompute(layers, args)
        kept.append(bytes_kept)
        again = max(again, bytes_again)
    passes = passes_in_flight(stage.index, args)
    whole, rest = divmod(passes, len(kept))
    total = again + whole * sum(kept) + sum(kept[:rest])
    micro_batches = -(-passes // len(kept))
    if stage.chunks[0].first:
        total += micro_batches * _dropout_masks(args, 1)
    if stage.chunks[-1].last:
        total += _head_bytes(args)
    return total


def passes_in_flight(stage: int, args: Namespace) -> int:
    """Forward passes (of a whole stage, or with virtual stages of one part) before the first backward one is done."""
    pp, count = args.pipeline_model_parallel_size, args.num_microbatches
    parts = args.virtual_pipeline_model_parallel_size
    if parts is None:
        return min(pp - stage, count)
    warm_up = 2 * (pp - stage - 1) + (parts - 1) * args.microbatch_group_size_per_vp_stage
    return min(warm_up + 1, parts * count)


def layer_bytes(args: Namespace, *, moe: bool) -> int:
    """The activations of one layer that the backward pass needs, of one micro batch, without full recomputation."""
    return sum(_parts(args, moe=moe).values())


def _parts(args: Namespace, *, moe: bool) -> dict[str, int]:
    """Bytes of a layer by what recomputation may leave out."""
    size, tp = _element(args), args.tensor_model_parallel_size
    tokens = args.seq_length * args.micro_batch_size
    # What lies outside of matrix products is whole on each TP rank, unless the sequence is split.
    outside = tokens * args.hidden_size // (tp if args.sequence_parallel else 1)
    queries = args.num_attention_heads * args.kv_channels
    keys = args.num_query_groups * args.kv_channels
    selected = set(args.recompute_modules or ()) if args.recompute_granularity == "selective" else set()
    no_norms = "layernorm" in selected or args.recompute_norm
    parts = {
        "norm inputs": 2 * outside * size,
        # The outputs of the norms are the inputs of query, key and value, and of the MLP.
        "norm outputs": 0 if no_norms else (1 if moe else 2) * outside * size,
        "dropout": 2 * _dropout_masks(args, tp if args.sequence_parallel else 1),
        # Queries, keys, values, and the input of the projection behind attention.
        "attention": tokens * (2 * queries + 2 * keys) // tp * size,
        "scores": 0 if args.use_flash_attn or "core_attn" in selected else _scores(args),
    }
    if not moe:
        parts["mlp"] = 0 if "mlp" in selected else _mlp(args, tokens, args.ffn_hidden_size, tp, selected)
        return parts
    if "moe" in selected:
        parts["norm outputs"] += outside * size
        return parts
    # Each token goes to some experts; with even loads each rank gets as many as it sends.
    etp = args.expert_tensor_parallel_size
    sent = tokens * args.moe_router_topk // tp * etp
    parts["dispatched"] = outside * size + sent * args.hidden_size * size
    parts["experts"] = _mlp(args, sent, args.moe_ffn_hidden_size, etp, selected)
    if args.moe_shared_expert_intermediate_size and "shared_experts" not in selected:
        parts["shared expert"] = _mlp(args, tokens, args.moe_shared_expert_intermediate_size, tp, selected)
    return parts


def _mlp(args: Namespace, tokens: int, width: int, ranks: int, selected: set[str]) -> int:
    """The input of the activation (twice as wide with a gate), and its output."""
    inputs = 2 if args.swiglu else 1
    drops_output = args.recompute_activation_function or "moe_act" in selected
    return tokens * width // ranks * (inputs + (0 if drops_output else 1)) * _element(args)


def _scores(args: Namespace) -> int:
    """The softmax; with dropout its mask and its result, too."""
    count = args.num_attention_heads * args.seq_length**2 * args.micro_batch_size // args.tensor_model_parallel_size
    return count * (_element(args) + (1 + _element(args) if args.attention_dropout else 0))


def _dropout_masks(args: Namespace, ranks: int) -> int:
    return args.seq_length * args.micro_batch_size * args.hidden_size // ranks if args.hidden_dropout else 0


def _head_bytes(args: Namespace) -> int:
    """The input of the final norm, that of the output layer, and logits in fp32, of one micro batch."""
    tp = args.tensor_model_parallel_size
    tokens = args.seq_length * args.micro_batch_size
    outside = tokens * args.hidden_size // (tp if args.sequence_parallel else 1)
    return 2 * outside * _element(args) + tokens * args.padded_vocab_size // tp * _FP32


def _after_recompute(layers: list[int], args: Namespace) -> tuple[int, int]:
    """Of the layers of a chunk: bytes that are kept for each micro batch, and bytes that come back at a time."""
    if args.recompute_granularity != "full" or not layers:
        return sum(layers), 0
    spread = args.tensor_model_parallel_size if args.sequence_parallel or args.distribute_saved_activations else 1
    entry = args.seq_length * args.micro_batch_size * args.hidden_size // spread * _element(args)
    count = args.recompute_num_layers
    if args.recompute_method == "uniform":
        units = [layers[start : start + count] for start in range(0, len(layers), count)]
        return len(units) * entry, max(map(sum, units))
    again, rest = layers[:count], layers[count:]
    return len(again) * entry + sum(rest), max(again)


def _element(args: Namespace) -> int:
    return 2 if args.bf16 or args.fp16 else _FP32
