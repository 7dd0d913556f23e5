"""Rows that run on the rank pool: what a model answers at an evaluation, and training around it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from tests.tasks.posttrain.rows import _batches, _running

Answers = list[tuple[list[int], list[int], str]]
"""(prompt, answer, why it ended) of each prompt."""


def answers(*, argv: list[str], mutant: str | None = None) -> Answers:
    """What a model answers to the prompts of the validation data."""
    with _running(argv) as (args, task), MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        samples = _samples(args, task, _model(args))
        prompts = [prompt.ids for prompt in samples.prompts[None]]
        found = samples.answers(prompts)
        return [(prompt, answer.ids, answer.finish_reason) for prompt, answer in zip(prompts, found, strict=True)]


def train(*, argv: list[str], steps: int, asks: bool, mutant: str | None = None) -> dict[str, Any]:
    """Train, and ask the model after each step, or not; the numbers of each step, weights and counters after the last,
    and the modes of modules.
    """
    with _running(argv) as (args, task), MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        from megatron.core.transformer.moe.moe_utils import (
            clear_aux_losses_tracker,
            get_moe_layer_wise_logging_tracker,
        )

        from mindspeed_llm.training.setup import complete_weights
        from mindspeed_llm.training.train_step import TrainStep

        model = _model(args)
        samples = _samples(args, task, model)
        step, batches = TrainStep(model, args, task.objective(args, model)), _batches(args, task)
        clear_aux_losses_tracker()  # of earlier rows of this process
        numbers, rows = [], 0
        for _ in range(steps):
            micro = list(itertools.islice(batches, args.num_microbatches))
            result = step.run([iter(micro) for _ in model.chunks])
            rows += len(samples.rows()) if asks else 0
            tracker = get_moe_layer_wise_logging_tracker()
            noted = {name: entry["values"].tolist() for name, entry in tracker.items()}
            numbers.append((result.loss, result.grad_norm, noted))
        with complete_weights(model):
            states = [
                {name: value.clone() for name, value in module.state_dict().items() if hasattr(value, "clone")}
                for module in model.modules
            ]
        modes = {inner.training for chunk in model.chunks for inner in chunk.modules()}
        return {"numbers": numbers, "rows": rows, "states": states, "modes": modes}


def _model(args: Any) -> Any:
    from mindspeed_llm.training.checkpointing import load_checkpoint
    from mindspeed_llm.training.folders import hf_directory
    from mindspeed_llm.training.setup import build_training_model

    model = build_training_model(args, hf_weights=hf_directory(args))
    if args.lora_load:
        load_checkpoint(args, model)
    return model


def _samples(args: Any, task: Any, model: Any) -> Any:
    from mindspeed_llm.training.eval_samples import build_eval_samples

    return build_eval_samples(args, model, task.build_datasets(args, None))


@contextlib.contextmanager
def own_part_of_the_vocabulary() -> Iterator[None]:
    """A fault: the first rank takes the best token of its part of the vocabulary for the best of all."""
    from mindspeed_llm.training import next_tokens

    with mock.patch.object(next_tokens, "_best_of_shards", lambda values, tokens: tokens):
        yield


@contextlib.contextmanager
def behind_the_padding() -> Iterator[None]:
    """A fault: the token behind the last place of the batch is taken, not the one behind the row."""
    from mindspeed_llm.training.next_tokens import PipelineNextTokens

    original = PipelineNextTokens._micro_batches

    def changed(self: Any, rows: Any, length: int) -> Any:
        return [(tokens, last * 0 + length - 1) for tokens, last in original(self, rows, length)]

    with mock.patch.object(PipelineNextTokens, "_micro_batches", changed):
        yield


@contextlib.contextmanager
def in_training_mode() -> Iterator[None]:
    """A fault: dropout and counters are at work while the model answers."""
    from mindspeed_llm.tasks.inference import eval_samples
    from mindspeed_llm.training.next_tokens import PipelineNextTokens

    with (
        mock.patch.object(eval_samples, "_evaluating", lambda modules: contextlib.nullcontext()),
        mock.patch.object(PipelineNextTokens, "__call__", torch.enable_grad()(PipelineNextTokens.__call__)),
    ):
        yield


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    function.__name__: function for function in (own_part_of_the_vocabulary, behind_the_padding, in_training_mode)
}
