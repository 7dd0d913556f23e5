"""All checks of the arguments of a training run, in order. Needs neither torch nor a process group."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from mindspeed_llm.errors import UserError
from mindspeed_llm.training.arguments.checks.data import check_checkpoints, check_data
from mindspeed_llm.training.arguments.checks.eval_samples import check_eval_samples
from mindspeed_llm.training.arguments.checks.experts import check_experts
from mindspeed_llm.training.arguments.checks.finetune import check_finetune
from mindspeed_llm.training.arguments.checks.parallel import (
    check_batch,
    check_ranks,
    check_stages,
    smallest_world_size,
)
from mindspeed_llm.training.arguments.checks.preference import check_preference
from mindspeed_llm.training.arguments.checks.recompute import check_recompute
from mindspeed_llm.training.arguments.checks.schedule import (
    check_learning_rate,
    check_length,
    check_optimizer,
    check_precision,
    check_weight_decay,
)
from mindspeed_llm.training.arguments.checks.structure import check_structure
from mindspeed_llm.training.arguments.no_effect import IDLE
from mindspeed_llm.training.arguments.parser import all_flags


def validate(args: Namespace, world_size: int) -> Namespace:
    """Check all arguments, and put in what follows from them (see each check); returns `args`.

    Raises:
        UserError: the first thing that does not fit: names flags and numbers, and what would do.
    """
    check_structure(args)
    check_stages(args)
    check_experts(args)
    check_ranks(args, world_size)
    check_batch(args)
    check_length(args)
    check_precision(args)
    check_optimizer(args)
    check_learning_rate(args)
    check_weight_decay(args)
    check_recompute(args)
    check_preference(args)
    check_finetune(args)
    check_data(args)
    check_eval_samples(args)
    check_checkpoints(args)
    args.notices += _idle(args)
    return args


def _idle(args: Namespace) -> tuple[str, ...]:
    """A line for each flag that has no effect beside the others."""
    dests = {name: name.lstrip("-").replace("-", "_") for name in IDLE}
    dests |= {name: flag.dest for name, flag in all_flags().items()}
    return tuple(
        f"{flag} has no effect {row.because}"
        for flag, row in IDLE.items()
        if dests[flag] in args.given and row.idle(args)
    )


def world_size_of(args: Namespace, environment: Mapping[str, str]) -> int:
    """The number of ranks of a run, or of the one that is planned, with --check or --list-features.

    Raises:
        UserError: WORLD_SIZE is no number above 0.
    """
    if args.check:
        return args.check
    text = environment.get("WORLD_SIZE")
    if text is None:
        return smallest_world_size(args) if args.check is not None or args.list_features else 1
    if not text.isdecimal() or not int(text):
        raise UserError(f"WORLD_SIZE {text!r} in the environment: expected a number above 0, as torchrun sets it")
    return int(text)
