"""Rows that run on the rank pool: training with local updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.core.lora import rows


def train(*, evaluates: bool = False, fault: str | None = None, **options: Any) -> dict[str, Any]:
    """`tests.core.lora.rows.train`; `forwards` has of each forward pass of a local layer in training its number, and
    whether gradients are asked for of its input and of its output.

    Args:
        evaluates: evaluate on each step's micro batches before the step.
        fault: of `FAULTS`.
    """
    with FAULTS[fault](), _watched() as forwards, _evaluating() if evaluates else contextlib.nullcontext():
        return {**rows.train(**options), "forwards": forwards}


@contextlib.contextmanager
def _watched() -> Iterator[list[tuple[int, bool, bool]]]:
    from mindspeed_llm.core.lora import local_layers

    original, seen = local_layers._without_graph, []

    def watched(forward: Any, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        output, context = original(forward, hidden_states, *arguments, **options)
        layer = forward.__self__
        if layer.training:
            seen.append((layer.layer_number, hidden_states.requires_grad, output.requires_grad))
        return output, context

    with mock.patch.object(local_layers, "_without_graph", watched):
        yield seen


@contextlib.contextmanager
def _evaluating() -> Iterator[None]:
    from mindspeed_llm.training.train_step import TrainStep

    original = TrainStep.run

    def run(self: TrainStep, batches: list[Iterator[Any]]) -> Any:
        held = [list(own) for own in batches]
        self.evaluate([iter(own) for own in held], count=len(held[0]))
        return original(self, [iter(own) for own in held])

    with mock.patch.object(TrainStep, "run", run):
        yield


@contextlib.contextmanager
def _sums_over_all_ranks_of_a_layer() -> Iterator[None]:
    """Tensor parallel ranks sum what is whole on each of them."""
    from mindspeed_llm.core.lora.local_learning import LocalRule

    with mock.patch.object(LocalRule, "has_own_tokens", True), mock.patch.object(LocalRule, "means", _sums):
        yield


def _sums(self: Any) -> list[Tensor]:
    # Divided by this rank's tokens.
    from torch import distributed

    count = distributed.get_world_size()
    sums, self.packed = count * self.packed[:-1] / self.packed[-1], None
    return [part.view_as(half.a) for part, half in zip(sums.chunk(len(self.halves)), self.halves, strict=True)]


@contextlib.contextmanager
def _recomputed_with_others() -> Iterator[None]:
    """Local layers are recomputed like others, for which gradients are asked for below them."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    from mindspeed_llm.core.lora import attach, local_layers

    def without_graph(block: TransformerBlock, count: int) -> None:
        block.register_forward_pre_hook(_asking, with_kwargs=True)

    def _asking(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        for each in (*arguments, *options.values()):
            if torch.is_tensor(each) and each.is_leaf and each.is_floating_point() and torch.is_grad_enabled():
                each.requires_grad_(True)

    assert local_layers.without_graph is attach.without_graph
    with mock.patch.object(attach, "without_graph", without_graph):
        yield


@contextlib.contextmanager
def _of_this_rank_alone() -> Iterator[None]:
    """No rank learns from the tokens of another one."""
    from mindspeed_llm.core.lora import local_learning

    with mock.patch.object(local_learning, "_sum", lambda tensors, group: None):
        yield


FAULTS: dict[str | None, Callable[[], Any]] = {
    None: contextlib.nullcontext,
    "sums_over_all_ranks_of_a_layer": _sums_over_all_ranks_of_a_layer,
    "recomputed_with_others": _recomputed_with_others,
    "of_this_rank_alone": _of_this_rank_alone,
}
