"""Supervised fine-tuning: the next token of replies."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_llm.training.data.datasets import Datasets, Progress
    from mindspeed_llm.training.objective import Objective
    from mindspeed_llm.training.setup import TrainingModel


class SupervisedFinetuning:
    """Instruction data, and the loss of pretraining on their labels; see `training.task.Task`."""

    def check_data(self, args: Namespace) -> None:
        """See `Task`."""
        from mindspeed_llm.tasks.posttrain.instruction_sources import check_instructions

        check_instructions(args)

    def build_datasets(self, args: Namespace, progress: Progress | None) -> Datasets:
        """See `Task`."""
        from mindspeed_llm.tasks.posttrain.instructions import build_instructions

        return build_instructions(args, progress)

    def objective(self, args: Namespace, model: TrainingModel, progress: Progress | None = None) -> Objective:
        """See `Task`."""
        from mindspeed_llm.training.objective import NextToken

        return NextToken()
