"""Data, tokenizer, evaluation, checkpoints: whether the flags say one thing, and whether the files are there."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from mindspeed_llm.errors import UserError

DEFAULT_SPLIT = "969,30,1"
"""Megatron's."""
_OF_EACH = ("train_data_path", "valid_data_path", "test_data_path")
_NEEDS = {
    "PretrainedFromHF": ("tokenizer_name_or_path",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
}


def check_data(args: Namespace) -> None:
    """Check where samples come from; puts in `split` and, where there is nothing to evaluate on, `eval_iters` 0.

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
    if args.split is not None:
        if each:
            raise UserError(
                f"--split {args.split} divides --data-path, but {_flag(each[0])} names the data of one part; leave one "
                "of them out"
            )
        parts = _split(args.split)
    else:
        parts = _split(DEFAULT_SPLIT)
    if each:
        if args.train_data_path is None:
            raise UserError(f"{_flag(each[0])} is given, but --train-data-path is not; give it, too")
        parts = [float(getattr(args, name) is not None) for name in _OF_EACH]
    else:
        args.split = args.split or DEFAULT_SPLIT
    for name in ("data_path", *_OF_EACH):
        if getattr(args, name):
            blend(getattr(args, name), _flag(name))
    if args.eval_iters and not parts[1]:
        if "eval_iters" in args.given:
            reason = f"--split {args.split}" if not each else "the lack of --valid-data-path"
            args.notices += (f"--eval-iters {args.eval_iters} has no effect: {reason} leaves no data to evaluate on",)
        args.eval_iters = 0
    _check_tokenizer(args)


def _split(text: str) -> list[float]:
    """The parts of --split; missing ones are 0."""
    try:
        parts = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts, default=-1) < 0 or not parts[0]:
        raise UserError(
            f"--split {text}: expected up to three numbers with commas, parts for training (above 0), validation and "
            f"test, such as {DEFAULT_SPLIT}"
        )
    return parts + [0.0] * (3 - len(parts))


def blend(words: tuple[str, ...], flag: str) -> list[tuple[float | None, str]]:
    """Weights and prefixes of a `--data-path`; no weights (None) where all words are prefixes.

    Raises:
        UserError: weights and prefixes do not take turns.
    """
    is_weight = [_is_number(word) for word in words]
    if not any(is_weight):
        return [(None, word) for word in words]
    if len(words) % 2 or not all(is_weight[::2]) or any(is_weight[1::2]):
        raise UserError(
            f"{flag} {' '.join(words)}: expected prefixes alone, or a weight before each prefix, such as 0.3 first 0.7 "
            "second"
        )
    weights = [float(word) for word in words[::2]]
    if min(weights) <= 0:
        raise UserError(f"{flag} {' '.join(words)}: expected weights above 0")
    return list(zip(weights, words[1::2], strict=True))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


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
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        if getattr(args, name):
            raise UserError(
                f"{_flag(name)} looks for the token that ends a document, which the tokenizer says; give "
                "--tokenizer-name-or-path"
            )


def check_checkpoints(args: Namespace) -> None:
    """Check what is loaded and saved.

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
    if args.exit_interval is not None and args.save_interval is not None and args.exit_interval > args.train_iters:
        raise UserError(
            f"--exit-interval {args.exit_interval} is more than --train-iters {args.train_iters}: it would never come; "
            "leave it out"
        )


def check_files(args: Namespace) -> None:
    """Check that the files are there that the flags name.

    Raises:
        UserError: names the flag and the path.
    """
    for name in ("data_path", *_OF_EACH):
        for _, prefix in blend(getattr(args, name) or (), _flag(name)):
            _check_prefix(prefix, _flag(name), args)
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        path = getattr(args, name)
        if path is not None and not Path(path).is_file():
            raise UserError(f"{_flag(name)} {path}: there is no such file")
    if args.enable_hf2mg_convert and not (Path(args.load) / "config.json").is_file():
        raise UserError(
            f"--enable-hf2mg-convert: --load {args.load} has no config.json; expected a Hugging Face model directory"
        )


def _check_prefix(prefix: str, flag: str, args: Namespace) -> None:
    found = [suffix for suffix in (".bin", ".idx") if Path(prefix + suffix).is_file()]
    if len(found) == 2:
        return
    if len(found) == 1:
        raise UserError(f"{flag} {prefix}: {prefix}{found[0]} is there, but its other half (.bin or .idx) is not")
    if not Path(prefix).exists():
        raise UserError(
            f"{flag} {prefix}: there is neither {prefix}.bin with {prefix}.idx, nor a file of this name; "
            "preprocess_data.py makes the former"
        )
    if args.tokenizer_type is None:
        raise UserError(f"{flag} {prefix} is a raw file, which needs a tokenizer; give --tokenizer-name-or-path")


def _flag(dest: str) -> str:
    return f"--{dest.replace('_', '-')}"
