"""Fine-tuning: what goes with --stage, and what does not."""

from __future__ import annotations

import math
from argparse import Namespace

from mindspeed_llm.errors import UserError
from mindspeed_llm.training.arguments.tables.finetune import FINETUNE

_OF_TEXT = {
    "mock_data": "samples that are made up are running text",
    "eod_mask_loss": "the labels of the data say where there is loss",
    "json_keys": "--handler-name says how records are laid out, and --map-keys which columns they have",
}


def check_finetune(args: Namespace) -> None:
    """Check the flags of fine-tuning; puts in `variable_seq_lengths`, and rounds `pad_to_multiple_of` up to what the
    ranks of a sequence divide.

    Raises:
        UserError: a flag without the stage that it belongs to, or flags that do not go together.
    """
    if args.stage is None:
        if args.is_instruction_dataset:
            raise UserError(
                "--is-instruction-dataset: pretrain_gpt.py reads running text; give --stage sft to posttrain_gpt.py"
            )
        for flag in FINETUNE.flags:
            if flag.dest in args.given:
                raise UserError(
                    f"{flag.name} belongs to fine-tuning; give --stage sft to posttrain_gpt.py, or leave it out"
                )
        return
    for dest, reason in _OF_TEXT.items():
        if dest in args.given:
            raise UserError(f"--{dest.replace('_', '-')} does not go with --stage {args.stage}: {reason}; leave it out")
    if args.neat_pack and not args.pack:
        raise UserError("--neat-pack says how --pack packs; add --pack or leave it out")
    if args.neat_pack and not args.reset_attention_mask:
        raise UserError(
            "--neat-pack keeps the samples of a row apart, which attention heeds with --reset-attention-mask; add it"
        )
    if args.no_shuffle and args.full_shuffle_instruction_dataset:
        raise UserError("--no-shuffle and --full-shuffle-instruction-dataset contradict each other; leave one out")
    if args.padded_samples and args.full_shuffle_instruction_dataset:
        raise UserError(
            "--padded-samples fills up each epoch, but --full-shuffle-instruction-dataset leaves no epochs; leave one "
            "out"
        )
    if args.no_pad_to_seq_lengths:
        args.variable_seq_lengths = True
    if args.variable_seq_lengths:
        _check_lengths(args)


def _check_lengths(args: Namespace) -> None:
    flag = "--no-pad-to-seq-lengths" if args.no_pad_to_seq_lengths else "--variable-seq-lengths"
    if args.sequence_parallel:
        args.pad_to_multiple_of = math.lcm(args.pad_to_multiple_of, args.tensor_model_parallel_size)
    spread = args.expert_model_parallel_size > 1 or args.pipeline_model_parallel_size > 1
    if args.num_experts and args.moe_token_dispatcher_type == "allgather" and spread:
        raise UserError(
            f"{flag}: ranks have batches of different lengths, which --moe-token-dispatcher-type allgather cannot "
            "send; use alltoall"
        )
    if args.virtual_pipeline_model_parallel_size is not None and args.pipeline_model_parallel_size == 2:
        raise UserError(
            f"{flag} with virtual stages needs more than 2 stages: two ranks would mix up the shapes of their "
            "messages; leave one of them out"
        )
