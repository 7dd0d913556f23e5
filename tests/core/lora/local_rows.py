"""Rows that run on the rank pool: training with local updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

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
    """Tensor parallel ranks sum whatever they have, for one rank's tokens."""
    from mindspeed_llm.core.lora.local_learning import LocalRule

    def means(self: LocalRule) -> list[Tensor]:
        self.packed[-1] /= self.group.size()
        return original(self)

    original = LocalRule.means
    with mock.patch.object(LocalRule, "has_own_tokens", True), mock.patch.object(LocalRule, "means", means):
        yield


@contextlib.contextmanager
def _of_this_rank_alone() -> Iterator[None]:
    """No rank learns from the tokens of another one."""
    from mindspeed_llm.core.lora import local_learning

    with mock.patch.object(local_learning, "_sum", lambda tensors, group: None):
        yield


@contextlib.contextmanager
def _tokens_of_one_micro_batch() -> Iterator[None]:
    """What the micro batches of a step teach adds up, where its mean is asked for."""
    from mindspeed_llm.core.lora.local_learning import LocalRule

    def add(self: LocalRule, inputs: Tensor, outputs: Tensor) -> None:
        if self.packed is not None:
            self.packed[-1] = 0
        original(self, inputs, outputs)

    original = LocalRule.add
    with mock.patch.object(LocalRule, "add", add):
        yield


FAULTS: dict[str | None, Callable[[], Any]] = {
    None: contextlib.nullcontext,
    "sums_over_all_ranks_of_a_layer": _sums_over_all_ranks_of_a_layer,
    "of_this_rank_alone": _of_this_rank_alone,
    "tokens_of_one_micro_batch": _tokens_of_one_micro_batch,
}
