"""What a run is about: its data, and what is minimised on them. All else is the same for every task."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mindspeed_llm.training.data.datasets import Datasets, Progress
    from mindspeed_llm.training.objective import Objective
    from mindspeed_llm.training.setup import TrainingModel


class Task(Protocol):
    """Pretraining, fine-tuning, ..."""

    def check_data(self, args: Namespace) -> None:
        """Check all that can be checked before data are worked through; imports no torch. Raises UserError."""
        ...

    def build_datasets(self, args: Namespace, progress: Progress | None) -> Datasets:
        """The data of the run; every process of the job calls this at the same place. Raises UserError."""
        ...

    def objective(self, args: Namespace, model: TrainingModel, progress: Progress | None = None) -> Objective:
        """What is minimised; every process of the job calls this at the same place. The model has the weights that the
        run starts or, with `progress`, goes on with. Raises UserError.
        """
        ...


class Pretraining:
    """The next token of running text."""

    def check_data(self, args: Namespace) -> None:
        """See `Task`."""
        from mindspeed_llm.training.data.sources import check_data

        check_data(args)

    def build_datasets(self, args: Namespace, progress: Progress | None) -> Datasets:
        """See `Task`."""
        from mindspeed_llm.training.data.datasets import build_datasets

        return build_datasets(args, progress=progress)

    def objective(self, args: Namespace, model: TrainingModel, progress: Progress | None = None) -> Objective:
        """See `Task`."""
        from mindspeed_llm.training.objective import NextToken

        return NextToken()
