"""What one logged training step consists of."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The figures of one logged step. Loss, times and throughput are of the interval since the last logged step."""

    iteration: int
    "Optimizer steps done so far, this one included."
    consumed_samples: int
    consumed_tokens: int
    elapsed_ms_per_iteration: float
    "Milliseconds."
    learning_rate: float
    "Value of the scheduler after its step."
    global_batch_size: int
    lm_loss: float
    grad_norm: float
    "Before clipping."
    max_memory_allocated_gb: float
    "GiB, largest over the ranks."
    max_memory_reserved_gb: float
    "GiB, largest over the ranks."
    tokens_per_second: float
    "Of all ranks together."
    mfu: float | None = None
    "Model FLOPs utilisation as a fraction; None when the device's peak is unknown."
    aux_loss: float | None = None
    "Router auxiliary loss; None when the model has none."
    mtp_loss: float | None = None
    "Multi-token-prediction loss; None when the model has none."
    cpu_used_memory_gb: float | None = None
    cpu_available_memory_gb: float | None = None
    cpu_memory_usage_percent: float | None = None
    extra: dict[str, float] = field(default_factory=dict)
    "More figures, written under their own names (`indexer_loss`, `rewards_...`)."
