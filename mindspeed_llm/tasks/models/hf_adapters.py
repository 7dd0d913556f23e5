"""Filling the adapters of a running job straight from PEFT's files: each rank reads only its own slices."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mindspeed_llm.core.lora.settings import LoraSettings
from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.adapter import in_form
from mindspeed_llm.tasks.checkpoint.adapter_reader import adapter_key
from mindspeed_llm.tasks.checkpoint.arguments import from_hf_config
from mindspeed_llm.tasks.checkpoint.boxes import Box
from mindspeed_llm.tasks.checkpoint.families import of_config
from mindspeed_llm.tasks.checkpoint.hf_reader import read_config
from mindspeed_llm.tasks.checkpoint.peft_files import open_peft, weight_files
from mindspeed_llm.tasks.checkpoint.sources import Fragment, Source, WithCopies
from mindspeed_llm.tasks.models.hf_weights import fill, topology_of


def load_peft_adapter(
    chunks: Sequence[nn.Module], folder: Path, model_folder: Path, args: Namespace, settings: LoraSettings
) -> None:
    """Fill the adapters of this rank from the ones in `folder`, in the dtype of their parameters.

    Args:
        chunks: the models of this rank's pipeline stage, one per virtual stage, without wrappers, with adapters.
        folder: a directory with PEFT's files.
        model_folder: the Hugging Face directory of the model that they are for.
        args: the arguments that the chunks were built from.
        settings: those of the adapters.

    Raises:
        UserError: the adapter is none that can be read, is for another model, holds NaN or infinity, or the flags say
            another rank, another alpha or other layers.
    """
    config = read_config(model_folder)
    where = str(model_folder / "config.json")
    family = of_config(config, where, requested=args.model_type_hf)
    adapter = open_peft(folder, family, from_hf_config(family, config, where))
    for flag, given, found in (
        ("--lora-r", settings.rank, adapter.rank),
        ("--lora-alpha", settings.alpha, adapter.alpha),
    ):
        if given != found:
            raise UserError(
                f"{flag} {given:g}: the adapter in --lora-load {folder} has {found:g}; give {flag} {found:g}"
            )
    form = in_form(adapter, list(settings.targets))
    model = adapter.model(topology_of(args), form)
    source: Source = WithCopies(FiniteOnly(adapter.source, weight_files(folder)[0]), model.written_copies)
    left = fill(
        [_adapters(chunk) for chunk in chunks],
        model,
        source,
        misplaced=lambda found: (
            f"--lora-load {folder}: {found}; --lora-target-modules {' '.join(settings.targets)} puts adapters elsewhere"
        ),
    )
    if left:
        raise UserError(
            f"--lora-load {folder} has nothing for {left[0]} and {len(left) - 1} more parameters of adapters; it has "
            f"adapters on {' '.join(adapter.targets)}, give those to --lora-target-modules"
        )


@dataclass(frozen=True)
class FiniteOnly:
    """A source of a run's adapters that refuses NaN and infinity: the loss would be NaN from the first step on."""

    source: Source
    path: Path

    def names(self) -> set[str]:
        """See `Source`."""
        return self.source.names()

    def dtype(self, name: str) -> torch.dtype:
        """See `Source`."""
        return self.source.dtype(name)

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """See `Source`; raises UserError at the first tensor with such a value."""
        for part, values in self.source.read(name, box):
            if not torch.isfinite(values).all():
                raise UserError(
                    f"--lora-load: {self.path} holds NaN or infinity, in {name} first: the training that wrote it has "
                    "failed, or the file is damaged. Give another adapter, or copy this one again"
                )
            yield part, values

    def fragments(self, name: str, box: Box) -> Iterator[Fragment]:
        """See `Source`."""
        return self.source.fragments(name, box)


def _adapters(chunk: nn.Module) -> Mapping[str, torch.Tensor]:
    return {name: parameter for name, parameter in chunk.named_parameters() if adapter_key(name) is not None}
