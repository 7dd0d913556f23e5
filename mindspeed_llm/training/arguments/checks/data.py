"""Data, tokenizer, evaluation, checkpoints: whether the flags say one thing. The files `training.data` looks at."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.splits import parse_split

DEFAULT_SPLIT = "969,30,1"
"""Megatron's."""
_OF_EACH = ("train_data_path", "valid_data_path", "test_data_path")
_NEEDS = {
    "PretrainedFromHF": ("tokenizer_name_or_path",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
}


def check_data(args: Namespace) -> None:
    """Check where samples come from; where there is nothing to evaluate on, `eval_iters` becomes 0.

    Raises:
        UserError: no data, or data from two places at once.
    """
    each = [name for name in _OF_EACH if getattr(args, name) is not None]
    named = (["--data-path"] if args.data_path else []) + [_flag(name) for name in each[:1]]
    named += ["--mock-data"] if args.mock_data else []
    if not named:
        raise UserError(
            "--data-path is missing; expected the prefix of a .bin/.idx pair (made by preprocess_data.py) or a raw "
            "file; --mock-data makes samples up"
        )
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)} both say where samples come from; leave one of them out")
    if args.split is not None and not args.data_path:
        raise UserError(f"--split {args.split} divides --data-path, but {named[0]} is given; leave one of them out")
    if each and args.train_data_path is None:
        raise UserError(f"{_flag(each[0])} is given, but --train-data-path is not; give it, too")
    has_more = (
        bool(args.valid_data_path or args.test_data_path)
        if each
        else args.mock_data or any(parse_split(args.split or DEFAULT_SPLIT, "--split")[1:])
    )
    if args.eval_iters and not has_more:
        if "eval_iters" in args.given:
            lack = "the lack of --valid-data-path and --test-data-path"
            reason = f"--split {args.split}" if not each else lack
            args.notices += (f"--eval-iters {args.eval_iters} has no effect: {reason} leaves no data to evaluate on",)
        args.eval_iters = 0
    _check_tokenizer(args)


def _check_tokenizer(args: Namespace) -> None:
    if args.tokenizer_type is None and args.tokenizer_name_or_path is not None:
        args.tokenizer_type = "PretrainedFromHF"
    kind = args.tokenizer_type
    for name in _NEEDS.get(kind, ()):
        if getattr(args, name) is None:
            raise UserError(f"--tokenizer-type {kind} needs {_flag(name)}")
    if kind == "MagistralTokenizer" and args.tokenizer_model is None and args.tokenizer_name_or_path is None:
        raise UserError("--tokenizer-type MagistralTokenizer needs --tokenizer-model or --tokenizer-name-or-path")
    if kind is not None:
        return
    if args.padded_vocab_size is None:
        raise UserError(
            "the size of the vocabulary is not known; give --tokenizer-name-or-path, or --vocab-size, or "
            "--model-from-hf"
        )
    if args.stage is not None:
        return
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if getattr(args, name):
            raise UserError(
                f"{_flag(name)} looks for the token that ends a document, which the tokenizer says; give "
                "--tokenizer-name-or-path"
            )


def check_checkpoints(args: Namespace) -> None:
    """Check what is loaded and saved; what is odd comes to `notices`.

    Raises:
        UserError: a flag lacks the one that it builds on.
    """
    if args.load is None:
        for flag, found in (
            ("--finetune", args.finetune),
            ("--ckpt-step", args.ckpt_step is not None),
            ("--enable-hf2mg-convert", args.enable_hf2mg_convert),
        ):
            if found:
                raise UserError(f"{flag} goes with --load, which is missing; add it or leave the flag out")
        if args.lora_target_modules:
            args.notices += ("without --load the weights are random, and LoRA leaves them so; name a model",)
        elif args.stage is not None:
            args.notices += ("without --load the model begins with random weights",)


def _flag(dest: str) -> str:
    return f"--{dest.replace('_', '-')}"
