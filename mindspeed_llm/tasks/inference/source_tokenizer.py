"""The tokenizer of a model, found before its weights are loaded."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.source import ModelSource
from mindspeed_llm.tasks.inference.tokenizer import named_tokenizer, names_tokenizer
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer


def early_tokenizer(args: Namespace, source: ModelSource) -> Tokenizer | None:
    """The tokenizer that flags name, else that of a Hugging Face directory; None where only the loader of the model
    (an adapter's, say) knows the folder that it lies in.

    Raises:
        UserError: it cannot be loaded.
    """
    if names_tokenizer(args):
        return named_tokenizer(args)
    return named_tokenizer(args, str(source.path)) if source.kind == "hf" and source.path.is_dir() else None


def required_tokenizer(args: Namespace, source: ModelSource) -> Tokenizer:
    """The tokenizer of a model of the Megatron backend whose `args` are complete.

    Raises:
        UserError: nothing names one, or it cannot be loaded.
    """
    tokenizer = named_tokenizer(args)
    if tokenizer is None:
        raise UserError(
            f"--load {source.path} brings no tokenizer; name it with "
            "--tokenizer-name-or-path (--tokenizer-type says its kind)"
        )
    return tokenizer
