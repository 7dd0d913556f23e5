"""The two things that a benchmark asks of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class LogLikelihood:
    """How likely is each continuation after the context? Answered with one sum of log-probabilities (nats) for each."""

    context: str
    continuations: tuple[str, ...]
    """With the blank that parts them from the context."""


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue the prompt greedily. Answered with the text before the first stop string."""

    prompt: str
    stop: tuple[str, ...]
    max_new_tokens: int


class Model(Protocol):
    """What answers requests, in their order."""

    def loglikelihood(self, requests: Sequence[LogLikelihood]) -> Sequence[Sequence[float]]:
        """For each request one number for each of its continuations."""
        ...

    def generate(self, requests: Sequence[Generate]) -> Sequence[str]:
        """For each request the new text."""
        ...
