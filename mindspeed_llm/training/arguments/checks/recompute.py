"""Recomputation of activations."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.errors import UserError
from mindspeed_llm.training.arguments.checks.words import divisors

MODULES = ("core_attn", "moe_act", "layernorm", "mlp", "moe", "shared_experts")
"""What --recompute-modules may name."""


def check_recompute(args: Namespace) -> None:
    """Check the flags of recomputation.

    Raises:
        UserError: flags that do not fit together.
    """
    granularity, method, count = args.recompute_granularity, args.recompute_method, args.recompute_num_layers
    if granularity != "full":
        for flag, found in (
            ("--recompute-method", method),
            ("--recompute-num-layers", count),
            ("--distribute-saved-activations", args.distribute_saved_activations or None),
        ):
            if found is not None:
                shown = flag if found is True else f"{flag} {found}"
                raise UserError(f"{shown} goes with --recompute-granularity full, found {granularity}")
    if granularity != "selective" and args.recompute_modules is not None:
        raise UserError(
            f"--recompute-modules {' '.join(args.recompute_modules)} goes with --recompute-granularity selective, "
            f"found {granularity}"
        )
    if granularity == "full":
        _check_full(args)
    elif granularity == "selective":
        _check_modules(args)


def _check_full(args: Namespace) -> None:
    if args.recompute_method is None:
        raise UserError("--recompute-granularity full needs --recompute-method uniform or block")
    if args.recompute_num_layers is None:
        raise UserError(
            f"--recompute-granularity full --recompute-method {args.recompute_method} needs --recompute-num-layers; 1 "
            "computes every layer again with uniform, and one layer of each stage with block"
        )
    stage = max(args.num_layer_list) if args.num_layer_list else args.num_layers // args.pipeline_model_parallel_size
    if args.recompute_num_layers > stage:
        raise UserError(
            f"--recompute-num-layers {args.recompute_num_layers}: a stage has only {stage} layers; expected 1 to "
            f"{stage}"
        )
    if args.recompute_method == "uniform":
        depth = args.num_layers_per_virtual_pipeline_stage or stage
        for layers in args.num_layer_list or [depth]:
            if layers % args.recompute_num_layers:
                raise UserError(
                    f"--recompute-method uniform computes --recompute-num-layers {args.recompute_num_layers} layers "
                    f"together, which do not divide the {layers} of a stage; expected one of {divisors(layers)}"
                )
    if args.distribute_saved_activations:
        if args.tensor_model_parallel_size == 1:
            raise UserError("--distribute-saved-activations needs --tensor-model-parallel-size above 1")
        if args.sequence_parallel:
            raise UserError(
                "--distribute-saved-activations goes without --sequence-parallel, which spreads them already; leave "
                "one of them out"
            )


def _check_modules(args: Namespace) -> None:
    modules = args.recompute_modules or ("core_attn",)
    for name in modules:
        if name not in MODULES:
            raise UserError(f"--recompute-modules {name}: expected some of {', '.join(MODULES)}")
    if "moe_act" in modules and not args.moe_grouped_gemm:
        raise UserError("--recompute-modules moe_act goes with --moe-grouped-gemm; add it or leave moe_act out")
    if "shared_experts" in modules and args.moe_shared_expert_overlap:
        raise UserError("--recompute-modules shared_experts goes without --moe-shared-expert-overlap; leave one out")
    args.recompute_modules = modules
