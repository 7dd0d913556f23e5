"""Annotated types that carry the range of a number, and small helpers for texts that hold lists."""

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers that a field accepts: `minimum <= x <= maximum`, or strictly `above < x < below`."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None

    def contains(self, number: float) -> bool:
        """Whether `number` satisfies every bound that is set."""
        return (
            (self.minimum is None or number >= self.minimum)
            and (self.maximum is None or number <= self.maximum)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )

    def describe(self) -> str:
        """The bounds in words of mathematics, such as `>= 0 and < 1`."""
        bounds = ((">=", self.minimum), (">", self.above), ("<=", self.maximum), ("<", self.below))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


PositiveInt = Annotated[int, Range(minimum=1)]
NonNegativeInt = Annotated[int, Range(minimum=0)]
# numpy and torch take seeds of 32 bits.
Seed = Annotated[int, Range(minimum=0, maximum=2**32 - 1)]
# -1 stands for "not limited".
IntOrMinusOne = Annotated[int, Range(minimum=-1)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(minimum=0)]
Ratio = Annotated[float, Range(minimum=0, maximum=1)]
Decay = Annotated[float, Range(minimum=0, below=1)]
# At a half, two labels would be equally right.
Smoothing = Annotated[float, Range(minimum=0, below=0.5)]


def comma_list(text: str | None) -> list[str]:
    """The items of a comma separated text, stripped; empty for None. Empty items stay, for checks to see."""
    return [] if text is None else [item.strip() for item in text.split(",")]
