"""The two things that a benchmark asks of a model, and its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model says to a request."""

    raw: str | tuple[float, ...]
    """The new text up to the first stop string (that of thoughts apart), or one number for each continuation."""
    begins_at: int = 0
    """Where the answer begins in a text: behind the thoughts of a model that thinks first."""
    thought_has_no_end: bool = False
    """The model was still thinking when its text ended: there is no answer, `begins_at` is the text's end."""
    cut_tokens: int = 0
    """So many tokens of the prompt's beginning did not fit into the model and were left out."""


Question = LogLikelihood | Generate


class Model(Protocol):
    """What answers questions."""

    def answer(self, asked: Sequence[Question], on_answer: Callable[[int, Answer], None]) -> None:
        """Answer all questions in an order of its own; (place in `asked`, answer) is told as soon as it is there."""
        ...
