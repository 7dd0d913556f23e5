"""Filling a stage of the Megatron backend for generation: from a Hugging Face directory, or a checkpoint."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from mindspeed_llm.core.lora.settings import LoraSettings


def fill(model: nn.Module, args: Namespace, lora: LoraSettings | None) -> None:
    """Fill a stage with the weights of `args.load` (a collective).

    Raises:
        UserError: they do not belong to the model.
        CheckpointError: a checkpoint is damaged, or asks for something to be executed.
    """
    from mindspeed_llm.tasks.models.hf_weights import load_hf_weights
    from mindspeed_llm.training.checkpointing import load_weights
    from mindspeed_llm.training.folders import hf_directory

    folder = hf_directory(args)
    if folder is not None:
        load_hf_weights([model], folder, args)
    else:
        load_weights(args, [model])
