"""Learning rate as a function of the optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspeed_llm.fsdp2.config.training_config import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule:
    """Linear warm-up from 0 to `peak`, then cosine to `minimum`, linear to 0, or constant.

    The same curves as transformers' `get_cosine_with_min_lr_schedule_with_warmup`, `get_linear_schedule_with_warmup`
    and `get_constant_schedule_with_warmup`.
    """

    kind: str
    peak: float
    minimum: float
    warmup_steps: int
    total_steps: int

    def at(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0; the first step of a warm-up has 0."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        progress = min(progress, 1.0)
        if self.kind == "constant":
            return self.peak
        if self.kind == "linear":
            return self.peak * (1.0 - progress)
        return self.minimum + (self.peak - self.minimum) * 0.5 * (1.0 + math.cos(math.pi * progress))


def build_schedule(config: TrainingConfig, total_steps: int) -> LearningRateSchedule:
    """The schedule of a run of `total_steps` optimizer steps; warm-up lasts `int(total_steps * warmup_ratio)` of
    them.
    """
    return LearningRateSchedule(
        kind=config.lr_scheduler_type,
        peak=config.lr,
        minimum=config.min_lr,
        warmup_steps=int(total_steps * config.warmup_ratio),
        total_steps=total_steps,
    )
