"""What is asked of a generator, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from its logits, applied in the order of the fields, as transformers does."""

    do_sample: bool = False
    """Draw a token; False: take the most probable one (the penalty still counts)."""
    repetition_penalty: float = 1.0
    """Above 0. Positive logits of tokens that the text has are divided by it, negative ones multiplied. 1: off."""
    temperature: float = 1.0
    """Above 0. The logits are divided by it."""
    top_k: int = 0
    """Only so many most probable tokens may be drawn. 0: all."""
    top_p: float = 1.0
    """Only the most probable tokens whose probabilities just reach this sum may be drawn; 1 (and 0): all."""
    seed: int = 0
    """Of this request's own random numbers, so that the answer does not depend on what else is in the batch."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the answer and are no part of it."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end the answer and are no part of it, wherever tokens begin and end."""
    sampling: Sampling = field(default_factory=Sampling)
    top_logprobs: int = 0
    """So many most probable alternatives are named at each token as well (endpoint)."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """An answer, or what there is of it so far."""

    token_ids: tuple[int, ...]
    """Without the token that ended it. With a stop string: up to the token in which the string begins, exclusively."""
    text: str
    """Decoded, special tokens left out, cut where a stop string begins."""
    logprobs: tuple[float, ...]
    """Natural logarithm of the probability of each token under the model's own logits (no temperature, no filter)."""
    finish_reason: FinishReason | None
    """None while the answer is not finished."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Per token: (token, logprob) of the alternatives, most probable first."""
