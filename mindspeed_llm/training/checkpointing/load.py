"""Loading a checkpoint of the Megatron backend."""

from __future__ import annotations

from argparse import Namespace

from mindspeed_llm.training.setup import TrainingModel
from mindspeed_llm.training.state import TrainState


def load_checkpoint(args: Namespace, model: TrainingModel) -> TrainState | None:
    """Load the checkpoint of `args.load` into the model, its optimizer and scheduler, and the random numbers (a
    collective). None where there is none.

    Raises:
        UserError: it belongs to another model or topology, or there is none and `--exit-on-missing-checkpoint`.
        CheckpointError: it is damaged, or asks for something to be executed.
    """
    raise NotImplementedError
