"""Rows that run on the rank pool: fine-tuning a toy step by step, whole runs of `posttrain_gpt.py`, and its batches."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mindspeed_llm.features_manager.features import FEATURES
from mindspeed_llm.features_manager.manager import FeaturesManager
from mindspeed_llm.tasks.posttrain.main import POSTTRAIN
from mindspeed_llm.training import main as training
from mindspeed_llm.training.initialize import initialize, shutdown


def finetune(*, argv: list[str]) -> int:
    """Run the command with `argv`; its exit code."""
    from mindspeed_llm.tasks.posttrain.main import main

    logger = logging.getLogger("mindspeed_llm")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        code = main(argv)
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    # The store that ranks wait on lives with rank 0, which must not leave first.
    dist.barrier()
    return code


@contextlib.contextmanager
def _running(argv: list[str]) -> Iterator[tuple[Any, Any]]:
    """The arguments and the task of a run whose process groups and patches exist within the context."""
    assert os.environ["WORLD_SIZE"] == str(dist.get_world_size())
    args, task, _ = training._arguments(argv, POSTTRAIN)
    features = FeaturesManager(FEATURES)
    initialize(args)
    try:
        features.apply(args)
        yield args, task
    finally:
        features.undo()
        shutdown()


def _batches(args: Any, task: Any, consumed: int = 0) -> Iterator[Any]:
    from mindspeed_llm.training.data.iterator import train_batches
    from mindspeed_llm.training.loop import data_parallel

    rank, size = data_parallel()
    dataset = task.build_datasets(args, None).train
    return train_batches(dataset, args, rank=rank, size=size, consumed=consumed)


def train(*, argv: list[str], steps: int, mutant: str | None = None) -> dict[str, Any]:
    """Train on the data that the flags name; losses, gradient norms, lengths of batches, and this rank's weights after
    the last step with its place in the topology.
    """
    with _running(argv) as (args, task), MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        from megatron.core import parallel_state

        from mindspeed_llm.training.setup import build_training_model, complete_weights
        from mindspeed_llm.training.train_step import TrainStep

        model = build_training_model(args, hf_weights=Path(args.load))
        step = TrainStep(model, args, task.objective(args, model))
        batches = _batches(args, task)
        losses, norms, lengths = [], [], []
        for _ in range(steps):
            micro = list(itertools.islice(batches, args.num_microbatches))
            lengths += [batch["tokens"].shape[1] for batch in micro]
            result = step.run([iter(micro) for _ in model.chunks])
            losses.append(result.loss)
            norms.append(result.grad_norm)
        with complete_weights(model):
            states = [
                {name: value.detach().clone() for name, value in module.state_dict().items() if value is not None}
                for module in model.modules
            ]
        place = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        )
        return {
            "losses": losses,
            "grad_norms": norms,
            "lengths": lengths,
            "states": states,
            "place": place,
            "args": args,
        }


def logits_with_a_change(*, argv: list[str], row: int, apart: bool = True) -> dict[str, Any]:
    """Logits [S, V of this rank] of a row that begins a global batch, and those where its second sample is another one.

    `documents` says which token is of which sample; where they are not `apart`, the model is not told.
    """
    with _running(argv) as (args, task):
        from mindspeed_llm.training.setup import build_training_model

        [module] = build_training_model(args, hf_weights=Path(args.load)).modules
        batch = next(_batches(args, task, consumed=row))
        documents = batch["documents"][0]
        changed = batch["tokens"].clone()
        changed[0, documents == 1] = (changed[0, documents == 1] + 1) % 250
        module.eval()
        with torch.no_grad():
            before, after = (
                module(tokens[:1], batch["position_ids"][:1], batch["documents"][:1] if apart else None)[0]
                for tokens in (batch["tokens"], changed)
            )
        return {"documents": documents, "before": before.clone(), "after": after.clone()}


@contextlib.contextmanager
def _changed(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    from mindspeed_llm.tasks.posttrain import instruction_batches

    original = instruction_batches.instruction_batch
    with mock.patch.object(
        instruction_batches, "instruction_batch", lambda *words, **named: change(original(*words, **named))
    ):
        yield


@contextlib.contextmanager
def mask_shifted() -> Iterator[None]:
    """A fault: the loss mask is that of the inputs, not of the targets."""
    with _changed(lambda batch: batch | {"loss_mask": batch["loss_mask"].roll(1, dims=1)}):
        yield


@contextlib.contextmanager
def labels_not_shifted() -> Iterator[None]:
    """A fault: each token is to predict itself."""
    with _changed(lambda batch: batch | {"labels": batch["tokens"]}):
        yield


@contextlib.contextmanager
def samples_see_each_other() -> Iterator[None]:
    """A fault: nobody says where the samples of a row begin."""
    with _changed(lambda batch: {name: value for name, value in batch.items() if name != "documents"}):
        yield


MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    function.__name__: function for function in (mask_shifted, labels_not_shifted, samples_see_each_other)
}
