"""Saving a run of the Megatron backend."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.training.setup import TrainingModel
from mindspeed_llm.training.state import TrainState


def save_checkpoint(args: Namespace, model: TrainingModel, state: TrainState) -> None:
    """Save after `state.iteration` steps in `args.save` (a collective).

    Raises:
        CheckpointError: on all ranks, with the first failing rank's cause.
    """
    raise NotImplementedError
