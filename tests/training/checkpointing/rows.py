"""Rows that run on the rank pool: training a toy with checkpoints."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.training.rows import Sample, micro_batches, running


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(
    *,
    folder: str,
    samples: list[Sample],
    steps: int,
    flags: list[str],
    save_at: Sequence[int] = (),
    from_hf: bool = True,
    values: dict[str, Any] | None = None,
    fail: tuple[type[BaseException], ...] = (),
) -> dict[str, Any]:
    """Train up to step `steps`, from the checkpoint of `--load` where there is one.

    Returns what must not change when a run is interrupted: per step (number, loss, gradient norm, learning rate), a
    draw of each generator after the last step, this rank's weights; and what was logged, and the error.
    """
    lines = _Lines()
    logger = logging.getLogger("mindspeed_llm")
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        with running(folder, flags, values or {}) as args:
            return _train(args, Path(folder) if from_hf else None, samples, steps, save_at, lines, fail)
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)


def _train(
    args: Any,
    hf_weights: Path | None,
    samples: list[Sample],
    steps: int,
    save_at: Sequence[int],
    lines: _Lines,
    fail: tuple[type[BaseException], ...],
) -> dict[str, Any]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from mindspeed_llm.checkpoints.storage import CheckpointError
    from mindspeed_llm.errors import UserError
    from mindspeed_llm.training.checkpointing import load_checkpoint, save_checkpoint
    from mindspeed_llm.training.setup import build_training_model
    from mindspeed_llm.training.state import TrainState
    from mindspeed_llm.training.train_step import TrainStep

    model = build_training_model(args, hf_weights=hf_weights)
    result: dict[str, Any] = {"log": lines.lines, "error": None, "steps": []}
    try:
        state = (load_checkpoint(args, model) if args.load else None) or TrainState()
        result["start"] = state.iteration
        step = TrainStep(model, args)
        while state.iteration < steps:
            micro = micro_batches(samples[state.consumed_train_samples :], args, 0)
            done = step.run([iter(micro) for _ in model.chunks])
            state.iteration += 1
            state.consumed_train_samples += args.global_batch_size
            if not done.updated:
                state.skipped_iterations += 1
            rate = model.optimizer.param_groups[0]["lr"]
            result["steps"].append((state.iteration, done.loss, done.grad_norm, rate))
            if state.iteration in save_at:
                save_checkpoint(args, model, state)
    except (UserError, CheckpointError, *fail) as error:
        result["error"] = (type(error).__name__, str(error))
        return result
    result["state"] = state
    result["scale"] = float(model.optimizer.get_loss_scale())
    result["draws"] = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    with get_cuda_rng_tracker().fork():
        result["draws"].append(float(torch.rand(())))
    for chunk in model.chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
    result["weights"] = [
        {name: value.detach().clone() for name, value in module.state_dict().items() if value is not None}
        for module in model.modules
    ]
    return result
