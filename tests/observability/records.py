"""A step record with settled figures, for the tests of this folder."""

from __future__ import annotations

from typing import Any

from mindspeed_llm.observability.record import StepRecord

_FIGURES: dict[str, Any] = {
    "iteration": 3,
    "consumed_samples": 24,
    "consumed_tokens": 6144,
    "elapsed_ms_per_iteration": 1234.567,
    "learning_rate": 9.87654321e-06,
    "global_batch_size": 8,
    "lm_loss": 2.3456789,
    "grad_norm": 1.23456,
    "max_memory_allocated_gb": 1.005,
    "max_memory_reserved_gb": 2.345,
    "tokens_per_second": 1658.91,
}


def step(**changes: Any) -> StepRecord:
    """The record with `changes`."""
    return StepRecord(**(_FIGURES | changes))
