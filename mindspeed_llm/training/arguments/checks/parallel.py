"""Ranks: how many there are, and how layers, heads and samples are spread over them."""

from __future__ import annotations

import math
from argparse import Namespace

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.layout import suggested_list
from mindspeed_llm.training.arguments.checks.words import divisors, require


def smallest_world_size(args: Namespace) -> int:
    """The smallest number of ranks that the parallel sizes allow."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    experts = (args.expert_tensor_parallel_size or tp) * args.expert_model_parallel_size
    return pp * math.lcm(tp * args.context_parallel_size, experts if args.num_experts else 1)


def check_ranks(args: Namespace, world_size: int) -> None:
    """Check the sizes of all groups of ranks; puts in `world_size`, `data_parallel_size`.

    Raises:
        UserError: the sizes do not fit the number of ranks or each other.
    """
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if cp > 1:
        raise UserError(f"--context-parallel-size {cp}: context parallelism is not available yet; expected 1")
    if world_size % (tp * pp):
        raise UserError(
            f"the number of ranks is {world_size}, no multiple of --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp} = {tp * pp}; start a multiple of it, or lower one of the sizes"
        )
    args.world_size = world_size
    args.data_parallel_size = world_size // (tp * pp)
    if args.num_experts is not None:
        ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size
        if world_size % (ep * etp * pp):
            raise UserError(
                f"the number of ranks is {world_size}, no multiple of --expert-model-parallel-size {ep} x "
                f"--expert-tensor-parallel-size {etp} x --pipeline-model-parallel-size {pp} = {ep * etp * pp}; start a "
                "multiple of it, or lower one of the sizes"
            )
    if args.sequence_parallel:
        if tp == 1:
            raise UserError(
                "--sequence-parallel splits the sequence over the ranks of --tensor-model-parallel-size, which is 1; "
                "raise it or leave --sequence-parallel out"
            )
        if args.seq_length % tp:
            raise UserError(
                f"--seq-length {args.seq_length} does not divide over --tensor-model-parallel-size {tp}, as "
                "--sequence-parallel needs"
            )
    _check_tensor_parallel(args)


def _check_tensor_parallel(args: Namespace) -> None:
    tp, heads, groups = args.tensor_model_parallel_size, args.num_attention_heads, args.num_query_groups
    if heads % tp or groups % tp:
        fitting = divisors(math.gcd(heads, groups))
        raise UserError(
            f"--tensor-model-parallel-size {tp} does not divide the {heads} query heads and {groups} key-value heads "
            f"of the model: a rank would cut through a head; expected one of {fitting} (use "
            "--pipeline-model-parallel-size or more data-parallel ranks instead)"
        )
    if args.ffn_hidden_size % tp:
        raise UserError(
            f"--ffn-hidden-size {args.ffn_hidden_size} does not divide over --tensor-model-parallel-size {tp}"
        )
    if args.position_embedding_type == "learned_absolute" and args.sequence_parallel and args.seq_length % tp:
        raise UserError(f"--seq-length {args.seq_length} does not divide over --tensor-model-parallel-size {tp}")


def check_stages(args: Namespace) -> None:
    """Check how layers are dealt out to pipeline stages; puts in `virtual_pipeline_model_parallel_size`, with
    `num_layers_per_virtual_pipeline_stage` to match, and `overlap_p2p_comm` as it can be.

    Raises:
        UserError: the layers do not divide; suggests a --num-layer-list.
    """
    layers, pp = args.num_layers, args.pipeline_model_parallel_size
    _check_noops(args)
    args.virtual_pipeline_model_parallel_size = None
    if args.num_layer_list is not None:
        _check_list(args)
    elif layers % pp:
        noops = f" ({len(args.noop_layers)} noop layers included)" if args.noop_layers else ""
        raise UserError(
            f"--pipeline-model-parallel-size {pp} does not divide --num-layers {layers}{noops}; use --num-layer-list "
            f"{suggested_list(layers, pp)}"
            if layers >= pp
            else f"--pipeline-model-parallel-size {pp}: the model has only --num-layers {layers}; expected at most "
            "that many stages"
        )
    else:
        size = args.virtual_pipeline_model_parallel_size = _virtual_size(args)
        args.num_layers_per_virtual_pipeline_stage = None if size is None else layers // pp // size
    # Without virtual stages a stage has nothing to compute while it sends.
    args.overlap_p2p_comm = args.overlap_p2p_comm and args.virtual_pipeline_model_parallel_size is not None


def _check_noops(args: Namespace) -> None:
    noops = args.noop_layers
    if noops is None:
        return
    text = ",".join(map(str, noops))
    wrong = [index for index in noops if not 0 <= index < args.num_layers]
    if wrong:
        raise UserError(
            f"--noop-layers {text}: {wrong[0]} is no position of --num-layers {args.num_layers}, which counts them, "
            f"from 0; expected 0 to {args.num_layers - 1}"
        )
    if len(set(noops)) != len(noops):
        raise UserError(f"--noop-layers {text}: a position occurs twice")
    if len(noops) == args.num_layers:
        raise UserError(f"--noop-layers {text}: no layer of --num-layers {args.num_layers} is left")


def _check_list(args: Namespace) -> None:
    stages, pp, layers = args.num_layer_list, args.pipeline_model_parallel_size, args.num_layers
    text = ",".join(map(str, stages))
    for dest in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "noop_layers"):
        if getattr(args, dest) is not None:
            raise UserError(f"--num-layer-list {text} goes without --{dest.replace('_', '-')}; leave one of them out")
    if len(stages) != pp:
        raise UserError(
            f"--num-layer-list {text} has {len(stages)} numbers; expected one for each stage of "
            f"--pipeline-model-parallel-size {pp}"
        )
    if sum(stages) != layers or min(stages) < 1:
        raise UserError(
            f"--num-layer-list {text}: expected numbers above 0 whose sum is --num-layers {layers}"
            + (f"; for example {suggested_list(layers, pp)}" if layers >= pp else "")
        )


def _virtual_size(args: Namespace) -> int | None:
    depth, parts = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    pp = args.pipeline_model_parallel_size
    per_stage = args.num_layers // pp
    if depth is None and parts is None:
        return None
    if depth is not None and parts is not None:
        raise UserError(
            f"--num-layers-per-virtual-pipeline-stage {depth} and --num-virtual-stages-per-pipeline-rank {parts} say "
            "the same; leave one of them out"
        )
    flag = (
        f"--num-layers-per-virtual-pipeline-stage {depth}"
        if depth is not None
        else f"--num-virtual-stages-per-pipeline-rank {parts}"
    )
    if pp == 1:
        raise UserError(
            f"{flag}: virtual stages need more than one stage; raise --pipeline-model-parallel-size or leave it out"
        )
    if per_stage % (depth or parts):
        raise UserError(
            f"{flag} does not divide the {per_stage} layers of a stage (--num-layers {args.num_layers} / "
            f"--pipeline-model-parallel-size {pp}); expected one of {divisors(per_stage)}"
        )
    size = per_stage // depth if depth is not None else parts
    if size == 1:
        return None
    if not args.overlap_p2p_comm and pp == 2:
        raise UserError(
            f"--no-overlap-p2p-communication with {flag} needs more than 2 stages: two ranks would wait for each "
            "other; leave it out"
        )
    return size


def check_batch(args: Namespace) -> None:
    """Check batch sizes; puts in `global_batch_size`, `num_microbatches`.

    Raises:
        UserError: the sizes do not divide, or are too few for the pipeline.
    """
    require(args, "--micro-batch-size", "the number of samples that a rank computes at once")
    micro, dp = args.micro_batch_size, args.data_parallel_size
    step = micro * dp
    if args.global_batch_size is None:
        args.global_batch_size = step
    batch = args.global_batch_size
    if batch % step:
        near = sorted({max(batch // step, 1) * step, (batch // step + 1) * step})
        raise UserError(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size {micro} x {dp} data-parallel ranks = "
            f"{step} ({args.world_size} ranks / TP {args.tensor_model_parallel_size} / PP "
            f"{args.pipeline_model_parallel_size}); {' or '.join(map(str, near))} would do"
        )
    args.num_microbatches = batch // step
    if args.virtual_pipeline_model_parallel_size is not None:
        _check_virtual_batch(args)


def _check_virtual_batch(args: Namespace) -> None:
    pp, count = args.pipeline_model_parallel_size, args.num_microbatches
    if args.microbatch_group_size_per_vp_stage is None:
        args.microbatch_group_size_per_vp_stage = pp
    group = args.microbatch_group_size_per_vp_stage
    if count < pp or 0 < count % group < pp:
        raise UserError(
            f"virtual stages: a step has {count} micro batches (--global-batch-size {args.global_batch_size} / "
            f"--micro-batch-size {args.micro_batch_size} / {args.data_parallel_size} data-parallel ranks), which "
            f"leaves stages idle; expected a multiple of {group}; change --global-batch-size to a multiple of "
            f"{group * args.micro_batch_size * args.data_parallel_size}"
        )
    if not pp <= group <= count:
        raise UserError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group}: expected --pipeline-model-parallel-size {pp} "
            f"to {count}, the micro batches of a step"
        )
