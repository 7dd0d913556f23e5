"""Rows that run on the rank pool: what a model answers at an evaluation, and training around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from mindspeed_llm.fsdp2.train import eval_samples, trainer
from mindspeed_llm.tasks.inference import eval_samples as inference
from tests.distributed import runs


def answers(*, argv: list[str]) -> list[tuple[list[int], list[int], str]]:
    """(prompt, answer, why it ended) of each prompt of the evaluation data, before training."""
    from mindspeed_llm.fsdp2 import main

    found: list[tuple[list[int], list[int], str]] = []

    class Probe:
        def __init__(self, config: Any, *, built: Any, tokenizer: Any, data: Any, device: Any, **_: Any) -> None:
            samples = eval_samples.build_eval_samples(config, built.model, tokenizer, data, device=device)
            assert samples is not None
            prompts = [prompt.ids for prompt in samples.prompts[None]]
            for prompt, answer in zip(prompts, samples.answers(prompts), strict=True):
                found.append((prompt, answer.ids, answer.finish_reason))

        def train(self) -> None:
            return

    with mock.patch.object(trainer, "Trainer", Probe):
        assert main.main(argv) == 0
    return found


def train(*, argv: list[str], mutant: str | None = None) -> dict[str, Any]:
    """As `tests.distributed.runs.train`."""
    with MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        return runs.train(argv=argv)


@contextlib.contextmanager
def in_training_mode() -> Iterator[None]:
    """A fault: dropout is at work while the model answers."""
    call = eval_samples.ModelNextTokens.__call__

    def drawing(self: Any, rows: Any) -> Any:
        self._model.train()
        return call(self, rows)

    with mock.patch.object(eval_samples.ModelNextTokens, "__call__", drawing):
        yield


@contextlib.contextmanager
def stays_in_evaluation_mode() -> Iterator[None]:
    """A fault: training goes on without dropout."""

    @contextlib.contextmanager
    def forgetting(modules: Any) -> Iterator[None]:
        for module in modules:
            module.eval()
        yield

    with mock.patch.object(inference, "_evaluating", forgetting):
        yield


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    function.__name__: function for function in (in_training_mode, stays_in_evaluation_mode)
}
