"""The command `pretrain_gpt.py`: from flags to a trained model.

Torch and megatron-core are imported only after the arguments have passed their checks, so that a typo is answered at
once; --model-from-hf, which reads a model directory with the tables of `tasks.checkpoint`, needs torch for it.
"""

from __future__ import annotations

import os
from argparse import Namespace

from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.features_manager.manager import FeaturesManager
from mindspeed_llm.training.arguments.checks.structure import check_vocabulary
from mindspeed_llm.training.arguments.parser import parse
from mindspeed_llm.training.arguments.validate import validate, world_size_of

_DESCRIPTION = "Pre-train a GPT model on megatron-core: pretrain_gpt.py under torchrun, or alone on one device."


def main(argv: list[str]) -> int:
    """Train as `argv` says (or only check, with `--check`, or list features); returns the exit code.

    Raises:
        UserError: a mistake in the flags, the data or the model directory.
        SystemExit: `--help`.
    """
    args, text = _arguments(argv)
    if args.list_features:
        from mindspeed_llm.features_manager.listing import print_features

        if _is_rank_zero():
            print_features(FeaturesManager(FEATURES).listing(args))
        return 0

    from mindspeed_llm.observability.log import get_logger, setup_logging

    setup_logging()
    logger = get_logger(__name__)
    if text and _is_rank_zero():
        print(text, flush=True)
    for notice in args.notices:
        logger.info(notice)
    if args.check is not None:
        return _check(args)
    _settle_vocabulary(args)
    from mindspeed_llm.training.pretrain import pretrain

    return pretrain(args)


def _arguments(argv: list[str]) -> tuple[Namespace, str]:
    """The arguments, checked and complete, and what --model-from-hf has to say."""
    args = parse(argv, FEATURES, program="pretrain_gpt.py", description=_DESCRIPTION)
    text = ""
    if args.model_from_hf is not None:
        from mindspeed_llm.training.arguments.model_from_hf import apply_model_from_hf

        text = apply_model_from_hf(args)
    validate(args, world_size_of(args, os.environ))
    FeaturesManager(FEATURES).validate(args)
    return args, text


def _check(args: Namespace) -> int:
    from mindspeed_llm.training.data.sources import check_data
    from mindspeed_llm.training.folders import check_folders

    check_folders(args)
    _settle_vocabulary(args)
    check_data(args)
    from mindspeed_llm.training.arguments.plan import plan_text

    if _is_rank_zero():
        print(plan_text(args), flush=True)
    return 0


def _settle_vocabulary(args: Namespace) -> None:
    """Take the size of the vocabulary from the tokenizer where no flag says it."""
    if args.padded_vocab_size is None:
        from mindspeed_llm.training.data.tokens import named_tokenizer

        tokenizer = named_tokenizer(args)
        assert tokenizer is not None, "validation lets no run without tokenizer and size of the vocabulary pass"
        check_vocabulary(args, len(tokenizer))


def _is_rank_zero() -> bool:
    return os.environ.get("RANK", "0") == "0"
