"""Experts: which layers have them, their sizes, the router, and their spread over ranks."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.core.layer_layout import moe_pattern
from mindspeed_llm.errors import UserError
from mindspeed_llm.training.arguments.checks.words import divisors

_NEED_EXPERTS = {
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
    "moe_shared_expert_intermediate_size": "--moe-shared-expert-intermediate-size",
    "n_shared_experts": "--n-shared-experts",
    "shared_expert_gate": "--shared-expert-gate",
    "moe_grouped_gemm": "--moe-grouped-gemm",
    "moe_expert_capacity_factor": "--moe-expert-capacity-factor",
    "moe_router_enable_expert_bias": "--moe-router-enable-expert-bias",
}


def check_experts(args: Namespace) -> None:
    """Check the flags of experts, and complete them; `moe_layer_pattern` gets a 0 or 1 for each layer.

    Raises:
        UserError: flags that do not fit together.
    """
    if args.num_experts is None:
        _check_dense(args)
        return
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    if args.add_bias_linear:
        raise UserError(f"--num-experts {args.num_experts}: experts have no biases here; add --disable-bias-linear")
    args.moe_layer_pattern = _pattern(args)
    _check_shared(args)
    _check_router(args)
    _check_dispatch(args)
    _check_ranks(args)


def _check_dense(args: Namespace) -> None:
    args.moe_layer_pattern = None
    if args.expert_model_parallel_size > 1:
        raise UserError(
            f"--expert-model-parallel-size {args.expert_model_parallel_size}: the model has no experts to deal out; "
            "give --num-experts or leave it out"
        )
    for dest, flag in _NEED_EXPERTS.items():
        if getattr(args, dest) not in (None, False, 0):
            raise UserError(f"{flag} goes with --num-experts, which is missing; add it, or leave the flag out")
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size


def _pattern(args: Namespace) -> list[int]:
    frequency, dense, layers = args.moe_layer_freq, args.first_k_dense_replace, args.num_layers
    if isinstance(frequency, tuple):
        if len(frequency) != layers:
            raise UserError(
                f"--moe-layer-freq has {len(frequency)} elements; expected one for each layer of --num-layers {layers}"
            )
        if dense is not None and dense > 0 and any(frequency[:dense]):
            raise UserError(
                f"--first-k-dense-replace {dense} contradicts --moe-layer-freq, whose list has experts there; leave it "
                "out"
            )
    elif frequency == 0 or frequency < -1:
        raise UserError(f"--moe-layer-freq {frequency}: expected 1 or more, or -1 for all layers")
    elif dense is not None and not -1 <= dense <= layers:
        raise UserError(f"--first-k-dense-replace {dense}: expected -1 to --num-layers {layers}")
    pattern = moe_pattern(args)
    if not any(pattern):
        raise UserError(
            f"--num-experts {args.num_experts}: --moe-layer-freq and --first-k-dense-replace leave no layer of "
            f"{layers} with experts"
        )
    return pattern


def _check_shared(args: Namespace) -> None:
    if args.n_shared_experts:
        size = args.n_shared_experts * args.moe_ffn_hidden_size
        given = args.moe_shared_expert_intermediate_size
        if given not in (None, size):
            raise UserError(
                f"--n-shared-experts {args.n_shared_experts} x --moe-ffn-hidden-size {args.moe_ffn_hidden_size} is "
                f"{size}, but --moe-shared-expert-intermediate-size is {given}; leave one of them out"
            )
        args.moe_shared_expert_intermediate_size = size
    if args.moe_shared_expert_intermediate_size is None:
        for dest, flag in (
            ("shared_expert_gate", "--shared-expert-gate"),
            ("moe_shared_expert_overlap", "--moe-shared-expert-overlap"),
        ):
            if getattr(args, dest):
                raise UserError(
                    f"{flag}: there is no shared expert; give --moe-shared-expert-intermediate-size or leave it out"
                )
    if args.moe_shared_expert_overlap and args.moe_token_dispatcher_type != "alltoall":
        raise UserError(
            f"--moe-shared-expert-overlap goes with --moe-token-dispatcher-type alltoall, found "
            f"{args.moe_token_dispatcher_type}"
        )


def _check_router(args: Namespace) -> None:
    experts, top, groups = args.num_experts, args.moe_router_topk, args.moe_router_num_groups
    if top > experts:
        raise UserError(f"--moe-router-topk {top}: the layer has only --num-experts {experts}")
    if top == 1 and args.norm_topk_prob and args.moe_router_score_function == "softmax":
        raise UserError(
            "--moe-router-topk 1 with --norm-topk-prob: the one weight would always be 1 and the router would not "
            "learn; leave --norm-topk-prob out"
        )
    if args.moe_router_enable_expert_bias and args.moe_router_score_function != "sigmoid":
        raise UserError(
            "--moe-router-enable-expert-bias goes with --moe-router-score-function sigmoid, found "
            f"{args.moe_router_score_function}"
        )
    if (groups is None) != (args.moe_router_group_topk is None):
        raise UserError(
            f"--moe-router-num-groups {groups} and --moe-router-group-topk {args.moe_router_group_topk}: one of them "
            "is missing; give both or neither"
        )
    if groups is not None:
        chosen = args.moe_router_group_topk
        if experts % groups:
            raise UserError(
                f"--moe-router-num-groups {groups} does not divide --num-experts {experts}; expected one of "
                f"{divisors(experts)}"
            )
        if chosen > groups:
            raise UserError(f"--moe-router-group-topk {chosen}: there are only --moe-router-num-groups {groups}")
        if top > chosen * (experts // groups):
            raise UserError(
                f"--moe-router-topk {top}: --moe-router-group-topk {chosen} groups have only "
                f"{chosen * (experts // groups)} experts; raise the latter"
            )
    kind = args.moe_router_load_balancing_type
    if args.moe_aux_loss_coeff and kind in ("none", "sinkhorn"):
        raise UserError(
            f"--moe-aux-loss-coeff {args.moe_aux_loss_coeff:g}: there is no such loss with "
            f"--moe-router-load-balancing-type {kind}; set it to aux_loss, seq_aux_loss or global_aux_loss, or leave "
            "the coefficient out"
        )


def _check_dispatch(args: Namespace) -> None:
    factor, kind = args.moe_expert_capacity_factor, args.moe_router_load_balancing_type
    if factor is None:
        if args.moe_pad_expert_input_to_capacity:
            raise UserError("--moe-pad-expert-input-to-capacity goes with --moe-expert-capacity-factor; give both")
        return
    if factor <= 0:
        raise UserError(f"--moe-expert-capacity-factor {factor:g}: expected more than 0; leave it out to drop no token")
    if args.moe_token_dispatcher_type != "alltoall":
        raise UserError(
            f"--moe-expert-capacity-factor {factor:g} goes with --moe-token-dispatcher-type alltoall, found "
            f"{args.moe_token_dispatcher_type}"
        )
    if kind == "sinkhorn":
        raise UserError(
            f"--moe-expert-capacity-factor {factor:g} goes without --moe-router-load-balancing-type sinkhorn"
        )


def _check_ranks(args: Namespace) -> None:
    tp, ep, experts = args.tensor_model_parallel_size, args.expert_model_parallel_size, args.num_experts
    if experts % ep:
        raise UserError(
            f"--expert-model-parallel-size {ep} does not divide --num-experts {experts}; expected one of "
            f"{divisors(experts)}"
        )
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = tp
    etp = args.expert_tensor_parallel_size
    if etp not in (1, tp):
        raise UserError(
            f"--expert-tensor-parallel-size {etp}: expected 1 (experts whole on each rank) or "
            f"--tensor-model-parallel-size {tp}"
        )
    if args.moe_ffn_hidden_size % etp:
        raise UserError(
            f"--moe-ffn-hidden-size {args.moe_ffn_hidden_size} does not divide over --expert-tensor-parallel-size {etp}"
        )
    if args.moe_shared_expert_intermediate_size and args.moe_shared_expert_intermediate_size % tp:
        raise UserError(
            f"--moe-shared-expert-intermediate-size {args.moe_shared_expert_intermediate_size} does not divide over "
            f"--tensor-model-parallel-size {tp}"
        )
    if tp > 1 and not args.sequence_parallel:
        raise UserError(
            f"--num-experts {experts} with --tensor-model-parallel-size {tp} needs --sequence-parallel: otherwise each "
            "of these ranks would send all tokens to the experts"
        )
