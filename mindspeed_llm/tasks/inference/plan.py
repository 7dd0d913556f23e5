"""`--check`: what would be loaded, and where, without loading it."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.tasks.inference.source import ModelSource

_GIB = 1024**3


def plan_text(args: Namespace, source: ModelSource, world_size: int) -> str:
    """What a run with these arguments would load.

    Raises:
        UserError: the model does not fit its flags, or the ranks; its tokenizer cannot be loaded.
    """
    lines = [f"Model            {source.description}", f"  backend        {source.backend}"]
    lines += (
        _megatron_lines(args, source, world_size)
        if source.backend == "megatron"
        else _hf_lines(args, source, world_size)
    )
    return "\n".join([*lines, "The arguments are valid."])


def _hf_lines(args: Namespace, source: ModelSource, world_size: int) -> list[str]:
    from mindspeed_llm.tasks.inference.source_tokenizer import early_tokenizer

    early_tokenizer(args, source)
    spread = "one copy, sharded over all" if args.shard_weights else "a copy on each"
    return [f"Ranks            {world_size}: {spread}"]


def _megatron_lines(args: Namespace, source: ModelSource, world_size: int) -> list[str]:
    from mindspeed_llm.tasks.inference.adapters.megatron_arguments import for_inference
    from mindspeed_llm.tasks.inference.megatron_model import complete
    from mindspeed_llm.tasks.inference.source_tokenizer import required_tokenizer
    from mindspeed_llm.training.arguments.checks.parallel import smallest_world_size
    from mindspeed_llm.training.arguments.parameters import model_of, stages_of, whole_model

    complete(args, source)
    tokenizer = required_tokenizer(args, source)
    if args.vocab_size is None and args.padded_vocab_size is None:
        args.vocab_size = len(tokenizer)
    checked = for_inference(args, world_size)
    model = model_of(checked)
    size = 2 if args.bf16 or args.fp16 else 4
    tp, pp, ep = (
        checked.tensor_model_parallel_size,
        checked.pipeline_model_parallel_size,
        checked.expert_model_parallel_size,
    )
    lines = [
        f"  parameters     {whole_model(model):,}",
        f"  precision      {'bf16' if args.bf16 else 'fp16' if args.fp16 else 'fp32'}: {size} bytes a parameter",
        f"Ranks            {world_size:,}: TP {tp} x PP {pp}"
        + (f", EP {ep}" if checked.num_experts else "")
        + (f", {copies} copies of the model" if (copies := world_size // smallest_world_size(checked)) > 1 else ""),
    ]
    for stage in stages_of(model):
        name = f"stage {stage.index}" if pp > 1 else "each rank"
        count = stage.count.total
        lines.append(f"  {name:<15}{count:,} parameters, {count * size / _GIB:.2f} GiB of weights")
    return lines
