"""Rows that run on the rank pool: training a toy with checkpoints, and choosing one without training."""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from tests.support.reference import make_samples
from tests.training.checkpointing.mutants import MUTANTS
from tests.training.rows import Sample, micro_batches, running

Saves = list[tuple[int, str, str]]
"""(step after which to save, format, folder)"""


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    handler, logger = _Lines(), logging.getLogger("mindspeed_llm")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def train(
    *,
    folder: str,
    vocabulary: int,
    steps: int,
    flags: list[str],
    saves: Saves = [],  # noqa: B006 (never changed)
    from_hf: bool = True,
    values: dict[str, Any] | None = None,
    mutant: str | None = None,
    with_weights: bool = False,
    nodes: list[str] | None = None,
) -> dict[str, Any]:
    """Train up to step `steps`, from the checkpoint of `--load` where there is one.

    Returns what must not change when a run is interrupted: per step (number, loss, gradient norm, learning rate), a
    draw of each generator after the last step, hashes of this rank's weights; and what was logged, and the error.

    Args:
        nodes: for each rank the folder that it takes for `--load` and `--save`: every rank is a node of its own then.
    """
    if nodes is not None:
        # The pool restores the environment.
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        own = nodes[dist.get_rank()]
        flags = [own if flags[index - 1] in ("--load", "--save") else flag for index, flag in enumerate(flags)]
        saves = [(number, kind, own) for number, kind, _ in saves]
    with logged() as lines, running(folder, flags, values or {}) as args, MUTANTS[mutant]():
        result: dict[str, Any] = {"log": lines, "error": None, "steps": [], "args": args}
        from mindspeed_llm.checkpoints.storage import CheckpointError
        from mindspeed_llm.errors import UserError

        try:
            samples = make_samples(count=88, vocabulary=vocabulary, no_target_every=5)
            _train(args, Path(folder) if from_hf else None, samples, steps, saves, with_weights, result)
        except (UserError, CheckpointError) as error:
            result["error"] = f"{type(error).__name__}: {error}"
        return result


def _train(
    args: Any,
    hf_weights: Path | None,
    samples: list[Sample],
    steps: int,
    saves: Saves,
    with_weights: bool,
    result: dict[str, Any],
) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from mindspeed_llm.training.checkpointing import load_checkpoint, save_checkpoint
    from mindspeed_llm.training.setup import build_training_model
    from mindspeed_llm.training.state import TrainState
    from mindspeed_llm.training.train_step import TrainStep

    model = build_training_model(args, hf_weights=hf_weights)
    state = (load_checkpoint(args, model) if args.load else None) or TrainState()
    result["start"] = state.iteration
    step = TrainStep(model, args)
    while state.iteration < steps:
        micro = micro_batches(samples[state.consumed_train_samples :], args, 0)
        done = step.run([iter(micro) for _ in model.chunks])
        state.iteration += 1
        state.consumed_train_samples += args.global_batch_size
        state.skipped_iterations += not done.updated
        rate = model.optimizer.param_groups[0]["lr"]
        result["steps"].append((state.iteration, done.loss, done.grad_norm, rate))
        for number, kind, target in saves:
            if number == state.iteration:
                args.ckpt_format, args.save = kind, target
                save_checkpoint(args, model, state)
    result["state"], result["scale"] = state, float(model.optimizer.get_loss_scale())
    result["draws"] = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    with get_cuda_rng_tracker().fork():
        result["draws"].append(float(torch.rand(())))
    for chunk in model.chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    weights = [
        {name: value.detach() for name, value in module.state_dict().items() if value is not None}
        for module in model.modules
    ]
    result["weights"] = [{name: hash_of(value) for name, value in chunk.items()} for chunk in weights]
    if with_weights:
        result["states"] = [{name: value.clone() for name, value in chunk.items()} for chunk in weights]
        result["place"] = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        )


def hash_of(values: torch.Tensor) -> str:
    """Tells tensors apart by their bytes."""
    return xxhash.xxh3_128_hexdigest(values.contiguous().view(torch.uint8).numpy().tobytes())


def pretrain(*, flags: str) -> dict[str, Any]:
    """A whole run of `pretrain_gpt.py`: the exit code, and what was logged."""
    from mindspeed_llm.training.pretrain import pretrain as run
    from tests.training.arguments.lines import arguments

    with logged() as lines:
        return {"code": run(arguments(flags, world_size=dist.get_world_size())), "log": lines}


def choose(*, loads: list[tuple[str, int | None]]) -> list[dict[str, Any]]:
    """For each folder (and --ckpt-step) the checkpoint that a run would go on from, or the error; and what was
    logged.
    """
    from argparse import Namespace

    from mindspeed_llm.checkpoints.storage import CheckpointError, open_storage_for_reading
    from mindspeed_llm.errors import UserError
    from mindspeed_llm.training.checkpointing.choose import choose as choose_one

    results = []
    for load, step in loads:
        with logged() as lines:
            result: dict[str, Any] = {"chosen": None, "error": None, "log": lines}
            try:
                storage = open_storage_for_reading(Path(load), dist.group.WORLD)
                found = choose_one(Namespace(load=load, ckpt_step=step), storage)
                result["chosen"] = None if found is None else str(found.folder)
            except (UserError, CheckpointError) as error:
                result["error"] = f"{type(error).__name__}: {error}"
        results.append(result)
    return results
