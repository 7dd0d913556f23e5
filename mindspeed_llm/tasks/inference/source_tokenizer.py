"""The tokenizer of a model, found before its weights are loaded."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.adapters.hf_files import holds_tokenizer
from mindspeed_llm.tasks.inference.source import ModelSource
from mindspeed_llm.tasks.inference.tokenizer import named_tokenizer, names_tokenizer
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer


def early_tokenizer(args: Namespace, source: ModelSource) -> Tokenizer | None:
    """The tokenizer that flags name, else that of a Hugging Face directory; None where only the loader of the model
    (an adapter's, say) knows the folder that it lies in.

    Raises:
        UserError: it cannot be loaded.
    """
    _check_folder(args)
    if names_tokenizer(args):
        return named_tokenizer(args)
    return named_tokenizer(args, str(source.path)) if source.kind == "hf" and source.path.is_dir() else None


def required_tokenizer(args: Namespace, source: ModelSource) -> Tokenizer:
    """The tokenizer of a model of the Megatron backend whose `args` are complete.

    Raises:
        UserError: nothing names one, or it cannot be loaded.
    """
    _check_folder(args)
    tokenizer = named_tokenizer(args)
    if tokenizer is None:
        raise UserError(
            f"--load {source.path} brings no tokenizer; name it with "
            "--tokenizer-name-or-path (--tokenizer-type says its kind)"
        )
    return tokenizer


def _check_folder(args: Namespace) -> None:
    """Raise UserError for a folder without a tokenizer, which its loader says after seconds and in other words."""
    name = args.tokenizer_name_or_path
    if name is not None and (folder := Path(name).expanduser()).is_dir() and not holds_tokenizer(folder):
        raise UserError(
            f"--tokenizer-name-or-path {name} holds no tokenizer (such as tokenizer.json); name a folder that has one"
        )
