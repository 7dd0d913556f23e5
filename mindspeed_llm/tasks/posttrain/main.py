"""The command `posttrain_gpt.py`: fine-tuning with everything that pretraining has."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.posttrain.dpo import PreferenceOptimization
from mindspeed_llm.tasks.posttrain.sft import SupervisedFinetuning
from mindspeed_llm.training import main as training
from mindspeed_llm.training.task import Task

STAGES: Mapping[str, Callable[[], Task]] = {"sft": SupervisedFinetuning, "dpo": PreferenceOptimization}
"""--stage -> its task."""


def _task_of(args: Namespace) -> Task:
    if args.stage is None:
        raise UserError(
            f"--stage is missing; expected what is to be trained: {', '.join(STAGES)} (pretrain_gpt.py pre-trains)"
        )
    return STAGES[args.stage]()


POSTTRAIN = training.Command(
    program="posttrain_gpt.py",
    description="Fine-tune a GPT model on megatron-core: posttrain_gpt.py under torchrun, or alone on one device.",
    task_of=_task_of,
)


def main(argv: list[str]) -> int:
    """Train as `argv` says, see `training.main.main`."""
    return training.main(argv, POSTTRAIN)
