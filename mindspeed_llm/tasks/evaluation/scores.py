"""Counts, accuracies and their standard errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Score:
    """How many of how many are right."""

    correct: int
    total: int
    stderr: float | None
    """Standard error of the accuracy; None where it is not defined (one sample has no variance)."""

    @property
    def accuracy(self) -> float:
        """The share that is right."""
        return self.correct / self.total


def mean_stderr(correct: int, total: int) -> float | None:
    """Standard error of the mean of `total` zeros and ones, with Bessel's correction: sqrt(p (1 - p) / (n - 1)).

    That is the sample standard deviation over sqrt(n), which lm-eval reports for a task.
    """
    if total < 2:
        return None
    share = correct / total
    return math.sqrt(share * (1 - share) / (total - 1))


def pooled_stderr(parts: Iterable[Score]) -> float | None:
    """Standard error of the accuracy over subjects that count by their size, from the variance within the subjects.

    sqrt(sum(s_i^2 (n_i - 1) n_i) / (N - k) / N) with s_i the standard error of subject i of n_i samples, k subjects,
    N samples: the pooled variance over N, which lm-eval reports for a group. A subject of one sample adds nothing to
    the sum. None where all subjects have one sample.
    """
    scores = list(parts)
    total = sum(score.total for score in scores)
    if total == len(scores):
        return None
    within = sum((score.stderr or 0.0) ** 2 * (score.total - 1) * score.total for score in scores)
    return math.sqrt(within / (total - len(scores)) / total)


def score(verdicts: Sequence[bool]) -> Score:
    """The score of one subject. Needs at least one verdict."""
    assert verdicts
    correct = sum(verdicts)
    return Score(correct=correct, total=len(verdicts), stderr=mean_stderr(correct, len(verdicts)))


def total_score(parts: Sequence[Score]) -> Score:
    """The score over subjects; each sample counts the same."""
    return Score(
        correct=sum(part.correct for part in parts),
        total=sum(part.total for part in parts),
        stderr=pooled_stderr(parts),
    )
