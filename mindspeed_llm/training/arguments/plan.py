"""`--check`: what each rank of a run will hold and how busy the pipeline is, without starting anything. Needs torch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from mindspeed_llm.tasks.checkpoint.layout import Chunk, Topology
from mindspeed_llm.tasks.checkpoint.model import Model, bind
from mindspeed_llm.training.arguments.memory import Memory, bytes_per_parameter, memory_of, optimizer_bytes
from mindspeed_llm.training.arguments.parameters import (
    Stage,
    active_per_token,
    adapters_of,
    model_of,
    stages_of,
    whole_model,
)

_GIB = 1024**3
_MEMORY = "Memory per rank"


def bubble_fraction(args: Namespace) -> float:
    """The time in which a stage waits, as a part of the time in which it computes: (p - 1) / m, with v virtual stages
    (p - 1) / (v m), see Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021).
    """
    parts = args.virtual_pipeline_model_parallel_size or 1
    return (args.pipeline_model_parallel_size - 1) / (parts * args.num_microbatches)


def plan_text(args: Namespace) -> str:
    """The plan of a run with these validated arguments.

    Raises:
        UserError: the sizes of the model do not fit the topology.
    """
    model = model_of(args)
    stages = stages_of(model, adapters_of(model, args))
    lines = [
        *_model_lines(model, args),
        *_adapter_lines(model, args),
        *_rank_lines(args),
        *_stage_lines(stages, args),
        "  (the libraries and the allocator's gaps come on top; activations by Korthikanti et al. 2022)",
        "The arguments are valid.",
    ]
    return "\n".join(lines)


def _model_lines(model: Model, args: Namespace) -> list[str]:
    total = whole_model(model)
    active = active_per_token(model, args.moe_router_topk)
    kind = f"{model.settings['num_layers']} layers, hidden {args.hidden_size:,}, heads {args.num_attention_heads} "
    kind += f"(key-value {args.num_query_groups}) x {args.kv_channels}"
    if args.num_experts:
        kind += f", {args.num_experts} experts of {args.moe_ffn_hidden_size:,}"
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    weight, gradient, state = bytes_per_parameter(args)
    return [
        f"Model            {kind}",
        f"  parameters     {total:,}" + (f" ({active:,} per token)" if active < total else ""),
        f"  vocabulary     {args.vocab_size:,}, padded to {args.padded_vocab_size:,}",
        f"  precision      {precision}: {weight} + {gradient} + {state} bytes a parameter (weight, gradient, "
        "optimizer)",
    ]


def _adapter_lines(model: Model, args: Namespace) -> list[str]:
    alone = bind(model.family, model.settings, Topology())
    adapters = adapters_of(alone, args)
    if adapters is None:
        return []
    [stage] = stages_of(adapters)
    targets = " ".join(args.lora_target_modules)
    return [
        f"  adapters       {stage.count.total:,} parameters of rank {args.lora_r} on {targets}; nothing else has "
        "gradients and optimizer state",
    ]


def _rank_lines(args: Namespace) -> list[str]:
    tp, pp, dp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.data_parallel_size
    text = f"Ranks            {args.world_size:,} = TP {tp} x PP {pp} x DP {dp}"
    if args.num_experts:
        text += f"; experts: EP {args.expert_model_parallel_size} x TP {args.expert_tensor_parallel_size}"
    steps = f"{args.train_iters:,} = {args.train_iters * args.global_batch_size:,} samples"
    lines = [
        text,
        f"  global batch   {args.global_batch_size:,} samples = DP {dp} x {args.micro_batch_size} x "
        f"{args.num_microbatches} micro batches",
        f"  tokens a step  {args.global_batch_size * args.seq_length:,} (sequence {args.seq_length:,})",
        f"  steps          {steps}",
    ]
    if pp > 1:
        parts = args.virtual_pipeline_model_parallel_size
        formula = "(PP - 1) / micro batches" if parts is None else "(PP - 1) / (virtual stages x micro batches)"
        lines.append(f"  bubble         {bubble_fraction(args):.1%} of the time that a stage computes: {formula}")
    return lines


_COLUMNS = ("parameters", "weights", "gradients", "optimizer", "activations", "together")


def _stage_lines(stages: list[Stage], args: Namespace) -> list[str]:
    names = [_stage_name(stage, several=len(stages) > 1) for stage in stages]
    width = max(len(_MEMORY), *(len(name) + 2 for name in names))
    lines = [f"{_MEMORY:<{width}}{_row(_COLUMNS)}"]
    for name, stage in zip(names, stages, strict=True):
        memory = memory_of(stage, args)
        cells = [f"{stage.count.total:,}", *(_size(value) for value in _values(memory))]
        lines.append(f"{'  ' + name:<{width}}{_row(cells)}")
    if args.data_parallel_size > 1:
        most = max(stages, key=lambda stage: stage.trained.total)
        distributed = args.use_distributed_optimizer
        other = _size(optimizer_bytes(most.trained, args, distributed=not distributed))
        word = "without" if distributed else "with"
        lines.append(f"  optimizer      {other} at most {word} --use-distributed-optimizer")
    return lines


def _row(cells: Sequence[str]) -> str:
    first, *others = cells
    return f"{first:>18}" + "".join(f"{cell:>13}" for cell in others)


def _values(memory: Memory) -> tuple[int, ...]:
    return (memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.total)


def _stage_name(stage: Stage, *, several: bool) -> str:
    ends = [word for chunk in stage.chunks for word in _ends(chunk)]
    layers = " + ".join(_layers(chunk) for chunk in stage.chunks)
    name = f"layers {layers}" + (f" ({', '.join(ends)})" if ends and several else "")
    return f"stage {stage.index}: {name}" if several else name


def _ends(chunk: Chunk) -> list[str]:
    return (["embedding"] if chunk.first else []) + (["output layer"] if chunk.last else [])


def _layers(chunk: Chunk) -> str:
    layers = [layer for _, layer in chunk.layers]
    if not layers:
        return "none"
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])


def _size(size: float) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 10 else f"{size / 2**20:.1f} MiB"
