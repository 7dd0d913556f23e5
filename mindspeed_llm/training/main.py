"""The command `pretrain_gpt.py`, and what `posttrain_gpt.py` has in common with it: from flags to a trained model.

Torch and megatron-core are imported only after the arguments have passed their checks, so that a typo is answered at
once; --model-from-hf, which reads a model directory with the tables of `tasks.checkpoint`, needs torch for it.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from mindspeed_llm.errors import UserError
from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.features_manager.manager import FeaturesManager
from mindspeed_llm.training.arguments.checks.structure import check_vocabulary
from mindspeed_llm.training.arguments.parser import parse
from mindspeed_llm.training.arguments.validate import validate, world_size_of
from mindspeed_llm.training.task import Pretraining, Task


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that trains."""

    program: str
    description: str
    task_of: Callable[[Namespace], Task]
    """The task that arguments ask for. Raises UserError where it is none of this command's."""


def _pretraining(args: Namespace) -> Task:
    if args.stage is not None:
        raise UserError(f"--stage {args.stage} is not for pretrain_gpt.py; posttrain_gpt.py takes it")
    return Pretraining()


PRETRAIN = Command(
    program="pretrain_gpt.py",
    description="Pre-train a GPT model on megatron-core: pretrain_gpt.py under torchrun, or alone on one device.",
    task_of=_pretraining,
)


def main(argv: list[str], command: Command = PRETRAIN) -> int:
    """Train as `argv` says (or only check, with `--check`, or list features); returns the exit code.

    Raises:
        UserError: a mistake in the flags, the data or the model directory.
        SystemExit: `--help`.
    """
    args, task, text = _arguments(argv, command)
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
        logger.warning(notice)
    if args.check is not None:
        return _check(args, task)
    _settle_vocabulary(args)
    from mindspeed_llm.training.pretrain import pretrain

    return pretrain(args, task)


def _arguments(argv: list[str], command: Command) -> tuple[Namespace, Task, str]:
    """The arguments, checked and complete, their task, and what --model-from-hf has to say."""
    args = parse(argv, FEATURES, program=command.program, description=command.description)
    task = command.task_of(args)
    text = ""
    if args.model_from_hf is not None:
        from mindspeed_llm.training.arguments.model_from_hf import apply_model_from_hf

        text = apply_model_from_hf(args)
    validate(args, world_size_of(args, os.environ))
    FeaturesManager(FEATURES).validate(args)
    return args, task, text


def _check(args: Namespace, task: Task) -> int:
    from mindspeed_llm.training.folders import check_folders

    check_folders(args)
    _settle_vocabulary(args)
    task.check_data(args)
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
