"""Numbers that answers can be asked for with, on command lines, by clients and by tasks alike. Needs no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """Both of them belong to the range."""

    low: float
    high: float
    hint: str = ""
    """What else a command line can say."""

    def has(self, value: Any) -> bool:
        """Whether `value` is a number within the bounds."""
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def read(self, text: str) -> float:
        """The number that stands on a command line. Raises argparse.ArgumentTypeError where it is none of these."""
        kind = int if isinstance(self.low, int) else float
        try:
            found = kind(text)
        except ValueError:
            found = None
        if not self.has(found):
            raise argparse.ArgumentTypeError(
                f"expected {self}, found {text!r}" + (f" ({self.hint})" if self.hint else "")
            )
        return found

    def __str__(self) -> str:
        kind = "whole number" if isinstance(self.low, int) else "number"
        low, high = (str(bound) if isinstance(bound, int) else f"{bound:.16g}" for bound in (self.low, self.high))
        return f"a {kind} from {low} to {high}"


# What is computed with them in fp32 stays finite for logits up to 1e30, and keeps their order. No text calls for more:
# at the lowest temperature tokens whose logits differ by 0.001 differ by 43 orders of magnitude, at the highest all are
# as probable.
TEMPERATURE = Bounds(1e-5, 1e5, hint="--task greedy takes the most probable tokens")
REPETITION_PENALTY = Bounds(1e-3, 1e3, hint="1: off")
# Products with logarithms of lengths are rounded less in double precision than sums of log-probabilities are in single.
LENGTH_PENALTY = Bounds(-1e6, 1e6, hint="0: sums are compared as they are")
# As torch has them. Of each text or request the seed is one more, for which room is left above.
SEED = Bounds(-(2**63), 2**63 - 1)
