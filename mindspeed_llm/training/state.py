"""How far a run is: what a checkpoint holds besides tensors and random numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class TrainState:
    """Counters of a run, the same on every rank."""

    iteration: int = 0
    """Steps done, skipped ones included."""
    consumed_train_samples: int = 0
    consumed_tokens: int | None = None
    """Tokens of the micro batches of training, padding included; None where a checkpoint does not say it."""
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    """Steps without an update: fp16 gradients overflowed."""
    floating_point_operations: float = 0.0
    """Of all ranks, so far."""
    data_layouts: tuple[int, ...] = ()
    """How the reading side laid the data out, see `training.data`: keeps the order of samples across changes."""
    last_checkpoint: int | None = None
    """Iteration of the checkpoint in the folder of `--save` that the run went on from, or wrote last. What that folder
    holds beyond it belongs to another run."""
