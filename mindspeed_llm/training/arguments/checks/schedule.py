"""The length of the run, the optimizer's flags, the learning rate, precision."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.errors import UserError


def check_length(args: Namespace) -> None:
    """Check the length of the run; puts in `train_iters`.

    Raises:
        UserError: it is missing, or said twice.
    """
    if args.train_iters is None and args.train_samples is None:
        raise UserError("--train-iters is missing; expected the number of steps (or --train-samples)")
    if args.train_iters is not None and args.train_samples is not None:
        raise UserError(
            f"--train-iters {args.train_iters} and --train-samples {args.train_samples} both say how long the run is; "
            "leave one of them out"
        )
    counted = "iters" if args.train_samples is None else "samples"
    other = "samples" if counted == "iters" else "iters"
    for name in (f"lr_decay_{other}", f"lr_warmup_{other}", f"lr_wsd_decay_{other}"):
        if getattr(args, name):
            raise UserError(
                f"--{name.replace('_', '-')} goes with --train-{other}, found --train-{counted}; use "
                f"--{name.replace('_', '-').replace(other, counted)}"
            )
    if args.train_iters is None:
        args.train_iters = args.train_samples // args.global_batch_size
        if not args.train_iters:
            raise UserError(
                f"--train-samples {args.train_samples} is less than --global-batch-size {args.global_batch_size}, one "
                "step"
            )


def check_learning_rate(args: Namespace) -> None:
    """Check the schedule; puts in `lr_warmup_steps`, `lr_decay_steps`, `wd_incr_steps`, `wsd_decay_steps`, which count
    samples, as megatron-core's scheduler does.

    Raises:
        UserError: rates or lengths that contradict each other.
    """
    if args.lr is None:
        raise UserError("--lr is missing; expected the highest learning rate, such as 1e-5")
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(args, name) > args.lr:
            raise UserError(
                f"--{name.replace('_', '-')} {getattr(args, name):g} is more than --lr {args.lr:g}; expected at most "
                "that"
            )
    _complete_steps(args)
    if args.lr_warmup_steps >= args.lr_decay_steps:
        raise UserError(
            f"{_warmup(args)}: the learning rate would rise for {args.lr_warmup_steps:g} samples, and fall from "
            f"{args.lr_decay_steps:g} on; expected less for the former"
        )
    if args.lr_decay_style == "WSD":
        if args.wsd_decay_steps is None:
            raise UserError("--lr-decay-style WSD needs --lr-wsd-decay-iters, the steps in which it falls")
        if args.wsd_decay_steps + args.lr_warmup_steps > args.lr_decay_steps:
            raise UserError(
                f"--lr-decay-style WSD: it rises for {args.lr_warmup_steps:g} samples and falls for "
                f"{args.wsd_decay_steps:g}, together more than {args.lr_decay_steps:g}; lower --lr-wsd-decay-iters"
            )
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise UserError(
            "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler contradict each other; leave one "
            "out"
        )


def _complete_steps(args: Namespace) -> None:
    batch = args.global_batch_size
    if args.train_samples is None:
        args.lr_decay_steps = (args.lr_decay_iters or args.train_iters) * batch
        args.wd_incr_steps = args.train_iters * batch
        fall = args.lr_wsd_decay_iters
        args.wsd_decay_steps = None if fall is None else fall * batch
        rise = args.lr_warmup_iters * batch
    else:
        args.lr_decay_steps = args.lr_decay_samples or args.train_samples
        args.wd_incr_steps = args.train_samples
        args.wsd_decay_steps = args.lr_wsd_decay_samples
        rise = args.lr_warmup_samples
    if args.lr_warmup_fraction is not None:
        if rise:
            raise UserError(
                f"{_warmup(args)} and --lr-warmup-fraction {args.lr_warmup_fraction:g} both say how long the learning "
                "rate rises; leave one of them out"
            )
        rise = args.lr_warmup_fraction * args.lr_decay_steps
    args.lr_warmup_steps = rise


def _warmup(args: Namespace) -> str:
    for name in ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"):
        if getattr(args, name):
            return f"--{name.replace('_', '-')} {getattr(args, name):g}"
    return "--lr-warmup-iters 0"


def check_weight_decay(args: Namespace) -> None:
    """Check weight decay; puts in `start_weight_decay`, `end_weight_decay`.

    Raises:
        UserError: values that contradict each other.
    """
    start, end = args.start_weight_decay, args.end_weight_decay
    if args.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            raise UserError(
                "--start-weight-decay and --end-weight-decay go with --weight-decay-incr-style linear or cosine; with "
                "constant give --weight-decay"
            )
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
        return
    if start is None or end is None or end < start:
        raise UserError(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs --start-weight-decay and, at least as "
            f"large, --end-weight-decay; found {start} and {end}"
        )


def check_precision(args: Namespace) -> None:
    """Check dtypes; puts in `accumulate_allreduce_grads_in_fp32`.

    Raises:
        UserError: flags that contradict each other.
    """
    if args.bf16 and args.fp16:
        raise UserError("--bf16 and --fp16 contradict each other; leave one of them out")
    if args.fp16 and args.loss_scale is None and (flag := _several_scales(args)):
        raise UserError(
            f"--fp16 with {flag}: parameters are in groups that would each adapt a loss scale of their own, while "
            "there is one loss; give a fixed --loss-scale, or --bf16 instead"
        )
    if args.grad_reduce_in_bf16:
        if not args.bf16:
            raise UserError("--grad-reduce-in-bf16 goes with --bf16; add it or leave the flag out")
        if args.accumulate_allreduce_grads_in_fp32:
            raise UserError(
                "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 contradict each other; leave one out"
            )
    elif args.bf16:
        args.accumulate_allreduce_grads_in_fp32 = True


def _several_scales(args: Namespace) -> str | None:
    """The flag for which megatron-core chains several optimizers, each with a scale that the others do not know."""
    if args.num_experts and args.expert_model_parallel_size > 1:
        return f"--expert-model-parallel-size {args.expert_model_parallel_size}"
    if args.num_experts and args.expert_tensor_parallel_size != args.tensor_model_parallel_size:
        return f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size}"
    return "--overlap-param-gather-with-optimizer-step" if args.overlap_param_gather_with_optimizer_step else None


def check_optimizer(args: Namespace) -> None:
    """Check what overlaps with what.

    Raises:
        UserError: a flag lacks the one that it builds on.
    """
    if args.overlap_param_gather:
        if not args.use_distributed_optimizer:
            raise UserError(
                "--overlap-param-gather goes with --use-distributed-optimizer, which spreads parameters to be "
                "gathered; add it or leave the flag out"
            )
        if not args.overlap_grad_reduce:
            raise UserError("--overlap-param-gather goes with --overlap-grad-reduce; add it or leave the flag out")
    if args.overlap_param_gather_with_optimizer_step and (
        not args.overlap_param_gather or args.virtual_pipeline_model_parallel_size is None
    ):
        raise UserError(
            "--overlap-param-gather-with-optimizer-step goes with --overlap-param-gather and virtual stages "
            "(--num-layers-per-virtual-pipeline-stage); add them or leave the flag out"
        )
    if args.use_distributed_optimizer and args.optimizer == "sgd":
        raise UserError("--use-distributed-optimizer goes with --optimizer adam, found sgd")
