"""Comparing two sides that were measured in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Pairwise ratios of a peer's times to ours: above 1 we are faster. `spread` is half the interquartile range."""

    name: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        if len(self.values) < 2:
            return 0.0
        quartiles = statistics.quantiles(self.values, n=4, method="inclusive")
        return (quartiles[2] - quartiles[0]) / 2

    def line(self, bar: float | None = None) -> str:
        """One line with all ratios; with a bar also whether it holds: the median is at or above it minus the spread."""
        text = f"{self.name}: median {self.median:.3f}, spread {self.spread:.3f}"
        text += f" ({' '.join(f'{value:.3f}' for value in self.values)})"
        if bar is not None:
            text += f"; bar {bar:.2f} {'holds' if self.median >= bar - self.spread else 'MISSED'}"
        return text


def speed_ratio(name: str, *, ours: Sequence[float], peer: Sequence[float]) -> Ratio:
    """Speed of ours over the peer's from seconds per step, pair by pair."""
    return Ratio(name=name, values=tuple(theirs / mine for mine, theirs in zip(ours, peer, strict=True)))
