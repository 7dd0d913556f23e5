"""Preference pairs: what goes with --stage dpo, and what does not."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.errors import UserError
from mindspeed_llm.training.arguments.tables.preference import PREFERENCE

_OF_INSTRUCTIONS = {
    "is_instruction_dataset": "the data are pairs",
    "pack": "each reply of a pair has a row of its own",
    "neat_pack": "each reply of a pair has a row of its own",
    "reset_attention_mask": "a row holds one reply, whose tokens all see each other",
    "reset_position_ids": "a row holds one reply",
}


def has_reference_copy(args: Namespace) -> bool:
    """Whether a second model is held beside the one that is trained."""
    return args.stage == "dpo" and (args.ref_model is not None or not args.lora_target_modules)


def check_preference(args: Namespace) -> None:
    """Check the flags of preference optimisation.

    Raises:
        UserError: a flag without the stage, the stage without pairs, or values that define no loss.
    """
    if args.stage != "dpo":
        for flag in PREFERENCE.flags:
            if flag.dest in args.given:
                raise UserError(
                    f"{flag.name} belongs to preference optimisation; give --stage dpo to posttrain_gpt.py, or leave "
                    "it out"
                )
        return
    if not args.is_pairwise_dataset:
        raise UserError(
            "--stage dpo trains on pairs of a chosen and a rejected reply, but --is-pairwise-dataset is missing; add "
            "it, with data that a handler for pairs has made"
        )
    for dest, reason in _OF_INSTRUCTIONS.items():
        if dest in args.given:
            raise UserError(f"--{dest.replace('_', '-')} does not go with --stage dpo: {reason}; leave it out")
    if not args.dpo_beta > 0:
        raise UserError(f"--dpo-beta {args.dpo_beta:g}: expected a number above 0, such as 0.1")
    smoothing = args.dpo_label_smoothing
    if smoothing >= 0.5:
        raise UserError(
            f"--dpo-label-smoothing {smoothing:g}: expected a number from 0 to below 0.5, where no reply of a pair is "
            "better any more"
        )
    if smoothing and args.dpo_loss_type != "sigmoid":
        raise UserError(
            f"--dpo-label-smoothing {smoothing:g} belongs to --dpo-loss-type sigmoid, not to {args.dpo_loss_type}; "
            "leave it out"
        )
