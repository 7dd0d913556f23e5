"""Offline preference optimisation: pairs of a chosen and a rejected reply, against a reference that stays as it is."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mindspeed_llm.training.data.datasets import Datasets, Progress
    from mindspeed_llm.training.objective import Objective
    from mindspeed_llm.training.setup import TrainingModel


class PreferenceOptimization:
    """Preference pairs, and the losses of `tasks.losses.preference` on them; see `training.task.Task`."""

    def check_data(self, args: Namespace) -> None:
        """See `Task`."""
        from mindspeed_llm.tasks.posttrain.instruction_sources import check_instructions
        from mindspeed_llm.tasks.posttrain.reference_source import reference_source

        reference_source(args)
        check_instructions(args, "pairwise")

    def build_datasets(self, args: Namespace, progress: Progress | None) -> Datasets:
        """See `Task`."""
        from mindspeed_llm.tasks.posttrain.instructions import build_instructions

        return build_instructions(args, progress, "pairwise")

    def objective(self, args: Namespace, model: TrainingModel, progress: Progress | None = None) -> Objective:
        """See `Task`."""
        from mindspeed_llm.tasks.losses.preference import PreferenceOptions
        from mindspeed_llm.tasks.posttrain.preference import Preference
        from mindspeed_llm.tasks.posttrain.reference import build_reference

        options = PreferenceOptions(
            loss_type=args.dpo_loss_type,
            beta=args.dpo_beta,
            label_smoothing=args.dpo_label_smoothing,
            pref_ftx=args.pref_ftx,
        )
        return Preference(args, build_reference(args, model, progress), options)
