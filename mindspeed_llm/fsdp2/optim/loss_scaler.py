"""Dynamic loss scaling for fp16, whose smallest positive number is 6e-8: small gradients would vanish without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class LossScaler:
    """Multiplies the loss; halves the factor when gradients overflow and doubles it after a stretch of good steps.

    The rule and the constants are those of `torch.amp.GradScaler`. The overflow test is the global gradient norm, which
    all ranks know, so that all ranks skip the same steps.
    """

    enabled: bool
    scale: float = 65536.0
    growth_interval: int = 2000
    _good_steps: int = field(default=0, repr=False)

    @property
    def factor(self) -> float:
        """What the loss is multiplied by now: 1 where scaling is off."""
        return self.scale if self.enabled else 1.0

    def as_values(self) -> dict[str, float]:
        """Plain values for a checkpoint; `load_values` reads them."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_values(self, values: Mapping[str, float]) -> None:
        """Go on as the scaler that gave `values`."""
        self.scale, self._good_steps = float(values["scale"]), int(values["good_steps"])

    def update(self, *, overflow: bool) -> None:
        """Report whether the gradients of the step that just ended held an inf or NaN."""
        if not self.enabled:
            return
        if overflow:
            self.scale /= 2
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self.growth_interval:
            self.scale *= 2
            self._good_steps = 0
