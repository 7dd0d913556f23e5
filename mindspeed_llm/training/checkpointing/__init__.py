"""Checkpoints of the Megatron backend. What needs torch and megatron-core is imported by the calls."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from mindspeed_llm.training.setup import TrainingModel
    from mindspeed_llm.training.state import TrainState


def save_checkpoint(args: Namespace, model: TrainingModel, state: TrainState) -> None:
    """Save a run: see `saving.save_checkpoint`."""
    from mindspeed_llm.training.checkpointing import saving

    saving.save_checkpoint(args, model, state)


def load_checkpoint(args: Namespace, model: TrainingModel) -> TrainState | None:
    """Load what a run goes on from: see `loading.load_checkpoint`, and for adapters `adapters.load_with_adapters`."""
    if args.lora_target_modules:
        from mindspeed_llm.training.checkpointing import adapters

        return adapters.load_with_adapters(args, model)
    from mindspeed_llm.training.checkpointing import loading

    return loading.load_checkpoint(args, model)


def check_adapter_export(args: Namespace, model: TrainingModel) -> None:
    """Check `--save-lora-to-hf` before a run: see `adapter_export.check_export`."""
    from mindspeed_llm.training.checkpointing import adapter_export

    adapter_export.check_export(args, model)


def load_weights(args: Namespace, modules: Sequence[nn.Module]) -> None:
    """Fill a model that is not trained: see `loading.load_weights`."""
    from mindspeed_llm.training.checkpointing import loading

    loading.load_weights(args, modules)
