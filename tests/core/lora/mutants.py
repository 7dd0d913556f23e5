"""Deliberate faults of adapters; each must make the parity of a row fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor


@contextlib.contextmanager
def gradient_of_a_not_summed() -> Iterator[None]:
    """Each tensor parallel rank keeps the gradient that comes from its own rows of B."""
    from mindspeed_llm.core.lora import linear

    with mock.patch.object(linear, "to_rows", lambda short, group, sequence_parallel: short):
        yield


@contextlib.contextmanager
def parts_of_the_sequence_not_summed() -> Iterator[None]:
    """Under sequence parallelism each rank keeps the gradient of what comes from its own tokens."""
    from mindspeed_llm.core.lora.linear import LoraLinear

    def mark(self: LoraLinear, halves: Any) -> None:
        original(self, halves)
        for parameter in (halves.a, halves.b):
            parameter.sequence_parallel = False

    original = LoraLinear._mark
    with mock.patch.object(LoraLinear, "_mark", mark):
        yield


@contextlib.contextmanager
def columns_not_summed() -> Iterator[None]:
    """A row layer's adapter takes this rank's inputs for all."""
    from mindspeed_llm.core.lora import linear

    with mock.patch.object(linear, "from_columns", lambda short, group, sequence_parallel: short):
        yield


@contextlib.contextmanager
def scale_forgotten() -> Iterator[None]:
    """B A x without alpha / r."""
    from mindspeed_llm.core.lora.settings import LoraSettings

    with mock.patch.object(LoraSettings, "scale", 1.0):
        yield


@contextlib.contextmanager
def parts_in_a_row() -> Iterator[None]:
    """The rows of queries, keys and values follow each other, instead of being told apart in each group."""
    import torch

    from mindspeed_llm.core.lora.linear import Rows

    def join(self: Rows, outputs: dict[int, Tensor]) -> Tensor:
        some = next(iter(outputs.values()))
        parts = range(len(self.widths))
        blank = [some.new_zeros(*some.shape[:-1], self.groups * width) for width in self.widths]
        return torch.cat([outputs.get(part, blank[part]) for part in parts], dim=-1)

    with mock.patch.object(Rows, "join", join):
        yield


@contextlib.contextmanager
def experts_not_summed() -> Iterator[None]:
    """A matrix of an expert's adapter that all ranks have keeps the gradient of this rank's part of the expert (under
    sequence parallelism only: elsewhere the other layers need what is replaced).
    """
    from mindspeed_llm.core.lora import linear

    with mock.patch.object(linear, "copy_to_tensor_model_parallel_region", lambda matrix, group: matrix):
        yield


@contextlib.contextmanager
def experts_counted_as_others() -> Iterator[None]:
    """The norm of gradients takes matrices of experts that are not cut for copies on other tensor parallel ranks."""
    from mindspeed_llm.core.lora import linear

    with mock.patch.object(linear, "mark", lambda *_, **__: None):
        yield


MUTANTS: dict[str | None, Callable[[], Any]] = {
    None: contextlib.nullcontext,
    "gradient_of_a_not_summed": gradient_of_a_not_summed,
    "parts_of_the_sequence_not_summed": parts_of_the_sequence_not_summed,
    "columns_not_summed": columns_not_summed,
    "scale_forgotten": scale_forgotten,
    "parts_in_a_row": parts_in_a_row,
    "experts_not_summed": experts_not_summed,
    "experts_counted_as_others": experts_counted_as_others,
}
