"""The tokenizer that flags name."""

from __future__ import annotations

from argparse import Namespace

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
