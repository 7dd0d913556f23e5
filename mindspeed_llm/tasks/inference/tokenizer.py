"""The tokenizer that flags name."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer, TokenizerOptions, load_tokenizer

TOKENIZER_FLAGS = ("tokenizer_type", "tokenizer_name_or_path", "tokenizer_model", "vocab_file", "merge_file")


def names_tokenizer(args: Namespace) -> bool:
    """Whether any flag names a tokenizer."""
    return any(getattr(args, name) for name in TOKENIZER_FLAGS)


def named_tokenizer(args: Namespace, folder: str | None = None) -> Tokenizer | None:
    """The tokenizer that the flags name, else the one in `folder`; None where there is neither.

    Raises:
        UserError: it cannot be loaded.
    """
    if not names_tokenizer(args) and folder is None:
        return None
    return load_tokenizer(
        TokenizerOptions(
            kind=args.tokenizer_type or TokenizerOptions.kind,
            name_or_path=args.tokenizer_name_or_path if names_tokenizer(args) else folder,
            model=args.tokenizer_model,
            vocab_file=args.vocab_file,
            merge_file=args.merge_file,
            use_fast=not args.tokenizer_not_use_fast,
            trust_remote_code=args.trust_remote_code,
        )
    )


def doubts(tokenizer: Tokenizer, vocab_size: int, folder: Path | None) -> Iterator[str]:
    """What is suspicious about a tokenizer and its model, for people; most have nothing.

    Args:
        vocab_size: tokens of the model.
        folder: where the tokenizer's files lie, as far as that is known.
    """
    behind = _behind_texts(tokenizer)
    if behind:
        names = _names(tokenizer, behind)
        yield (
            f"the tokenizer puts {names} behind every text ({_setting(folder)}): prompts without a chat template end "
            "in it, answers go on behind it, and the likelihood of a choice counts it in place of the first token of "
            "the choice; generate of transformers and lm-eval do the same. Answers and scores are usually poor: turn "
            "it off in the tokenizer's files if it is not meant"
        )
    if 2 * len(tokenizer) < vocab_size:
        yield (
            f"the tokenizer has {len(tokenizer):,} tokens, the model {vocab_size:,}: less than half, so that it is "
            "probably that of another model, and its ids mean other tokens; name the right one with "
            "--tokenizer-name-or-path"
        )


def _behind_texts(tokenizer: Tokenizer) -> list[int]:
    """The tokens that are put behind a text."""
    text = "a"
    plain, whole = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=True)
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[start + len(plain) :]
    return []


def _names(tokenizer: Tokenizer, ids: list[int]) -> str:
    if ids == [tokenizer.eos_token_id]:
        return f"its end of text ({tokenizer.eos_token})"
    return repr(tokenizer.decode(ids))


def _setting(folder: Path | None) -> str:
    """Which file says that tokens stand behind texts."""
    if folder is None:
        return "as its files say"
    file = folder / "tokenizer_config.json"
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(config, dict) and config.get("add_eos_token"):
            return f"add_eos_token true in {file}"
    file = folder / "tokenizer.json"
    return f"post_processor in {file}" if file.is_file() else f"as the files in {folder} say"
