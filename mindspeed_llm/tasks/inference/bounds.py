"""Numbers that answers can be asked for with, on command lines, by clients and by tasks alike. Needs no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from mindspeed_llm.errors import UserError


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
# More texts have no use for any device; how many fit into memory is seen when it is reserved.
BATCH_SIZE = Bounds(1, 2**16)
_MOST_DRAWN_FROM = 1 << 24
"""torch.multinomial draws from no more."""


def check_beams(beams: int, vocab_size: int, *, sample: bool, tokens_kept: int = 2) -> None:
    """Check how many answers a beam search is to follow.

    Args:
        tokens_kept: next tokens of each beam that are looked at; two at least.

    Raises:
        UserError: there are more than the model has tokens, or than can be drawn from.
    """
    if beams * tokens_kept > vocab_size:
        raise UserError(
            f"--num-beams is {beams}: a search looks at {beams * tokens_kept} next tokens, the model has {vocab_size}. "
            "Take fewer beams."
        )
    if sample and beams * vocab_size > _MOST_DRAWN_FROM:
        raise UserError(
            f"--num-beams is {beams}: tokens are drawn from those of all beams together, {beams} x {vocab_size} of "
            f"this model, and at most {_MOST_DRAWN_FROM} can be drawn from. Take {_MOST_DRAWN_FROM // vocab_size} "
            "beams or fewer, or search without drawing."
        )
