"""From logits to the next token: repetition penalty, temperature, top-k and top-p as transformers has them, and a draw.

A token is drawn by one number in [0, 1): it is the first whose probability, added to those of all tokens before it in
the vocabulary, passes that number. So a draw takes one random number of the request's own, whatever the size of the
vocabulary, and rows of one batch know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.bounds import REPETITION_PENALTY, TEMPERATURE, Bounds
from mindspeed_llm.tasks.inference.generation import Sampling

_REMOVED = float("-inf")
_SHARE = Bounds(0.0, 1.0)
_NUCLEUS = 512
"""Top-p hardly ever leaves more tokens: sorting these is enough then, and sorting a whole vocabulary takes long."""


def check(sampling: Sampling) -> None:
    """Raise UserError for a value that no distribution can be made with."""
    if not REPETITION_PENALTY.has(sampling.repetition_penalty):
        raise UserError(
            f"repetition penalty is {sampling.repetition_penalty!r}; expected {REPETITION_PENALTY} (1: off)"
        )
    if not TEMPERATURE.has(sampling.temperature):
        raise UserError(
            f"temperature is {sampling.temperature!r}; expected {TEMPERATURE} (for the most probable token each time, "
            "choose greedy decoding)"
        )
    if not isinstance(sampling.top_k, int) or sampling.top_k < 0:
        raise UserError(f"top-k is {sampling.top_k!r}; expected a number of tokens, or 0 for all")
    if not _SHARE.has(sampling.top_p):
        raise UserError(f"top-p is {sampling.top_p!r}; expected a probability from 0 to 1 (1 and 0: all tokens)")
    if not -(2**63) <= sampling.seed < 2**64:
        raise UserError(f"the seed is {sampling.seed}; expected an integer of 64 bits")


class Sampler:
    """Chooses the tokens of one text: its own random numbers, and the tokens that the penalty looks at."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        """`prompt`: the tokens that the text begins with. Raises UserError as `check` does."""
        check(sampling)
        self.sampling = sampling
        self.takes_most_probable = not sampling.do_sample and sampling.repetition_penalty == 1.0
        # Rows that differ in nothing but their random numbers are computed together.
        self.kind = replace(sampling, seed=0)
        self._generator = torch.Generator().manual_seed(sampling.seed) if sampling.do_sample else None
        # The penalty counts a token once.
        self._seen = dict.fromkeys(prompt) if sampling.repetition_penalty != 1.0 else None

    def add(self, token: int) -> None:
        """The text goes on with `token`."""
        if self._seen is not None:
            self._seen[token] = None

    def seen(self) -> Tensor:
        """The tokens that the text has, [number of different ones], int64."""
        assert self._seen is not None
        return torch.tensor(list(self._seen), dtype=torch.int64)

    def uniform(self) -> float:
        """The next random number in [0, 1)."""
        assert self._generator is not None
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()


def choose(logits: Tensor, samplers: Sequence[Sampler]) -> Tensor:
    """The next token of each row of logits [R, V]: [R], int64, on their device. Logits are left as they are.

    The samplers' random numbers go on by one; `Sampler.add` is the caller's.
    """
    if all(sampler.takes_most_probable for sampler in samplers):
        return logits.argmax(dim=-1)
    tokens = torch.empty(len(samplers), dtype=torch.int64, device=logits.device)
    groups: dict[Sampling, list[int]] = {}
    for row, sampler in enumerate(samplers):
        groups.setdefault(sampler.kind, []).append(row)
    for kind, rows in groups.items():
        seen = [samplers[row].seen() for row in rows] if kind.repetition_penalty != 1.0 else []
        if kind.do_sample:
            numbers = torch.tensor([samplers[row].uniform() for row in rows], dtype=torch.float64)
            tokens[rows] = choices(logits[rows], kind, seen).drawn(numbers)
        else:
            tokens[rows] = penalised(logits[rows], kind.repetition_penalty, seen).argmax(dim=-1)
    return tokens


@dataclass(frozen=True)
class Choices:
    """What may be drawn in each row."""

    scores: Tensor
    """[R, C]; minus infinity for what may not."""
    tokens: Tensor | None
    """The token of each score, ascending in a row; None: the columns themselves."""

    def drawn(self, numbers: Tensor) -> Tensor:
        """One token of each row, [R], by its number in [0, 1) [R], float64."""
        # In double precision: a sum over a large vocabulary would move the borders between its last tokens.
        sums = self.scores.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        # The whole is not exactly 1. Where nothing is added, no number is passed: what was removed is never drawn.
        numbers = numbers.to(sums.device)[:, None] * sums[:, -1:]
        places = torch.searchsorted(sums, numbers, right=True)
        return (places if self.tokens is None else self.tokens.gather(-1, places))[:, 0]


def choices(logits: Tensor, sampling: Sampling, seen: Sequence[Tensor] = (), *, keep: int = 1) -> Choices:
    """What may be drawn in rows [R, V] that are all sampled alike, with the scores that transformers' logits processors
    give. Of tokens with equal scores at the border of top-p those later in the vocabulary are kept.

    Args:
        logits: left as they are.
        seen: the different tokens of each row's text, where there is a repetition penalty.
        keep: so many tokens are left by top-k and top-p at least.
    """
    scores = penalised(logits, sampling.repetition_penalty, seen)
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    size, has_nucleus = scores.shape[-1], 0 < sampling.top_p < 1
    if sampling.top_k:
        lowest = scores.topk(min(max(sampling.top_k, keep), size))[0][:, -1:]
        removed = scores < lowest
        # More than k where the last ones are equal.
        scores = scores.masked_fill(removed, _REMOVED)
        tokens = _most_probable(scores, size - int(removed.sum(dim=-1).min()))
        few = Choices(scores.gather(-1, tokens), tokens)
        return _nucleus(few, sampling.top_p, keep) if has_nucleus else few
    if not has_nucleus:
        return Choices(scores, None)
    if size > _NUCLEUS:
        tokens = _most_probable(scores, _NUCLEUS)
        few = Choices(scores.gather(-1, tokens), tokens)
        rest = 1 - scores.softmax(dim=-1).gather(-1, tokens).sum(dim=-1, keepdim=True)
        found = _nucleus(few, sampling.top_p, keep, rest=rest)
        # Of tokens as probable as the last of these few, there may be others, which would have to be looked at.
        kept = found.scores.masked_fill(found.scores == _REMOVED, -_REMOVED).amin(dim=-1)
        if (kept > few.scores.amin(dim=-1)).all():
            return found
    return _nucleus(Choices(scores, None), sampling.top_p, keep)


def penalised(logits: Tensor, penalty: float, seen: Sequence[Tensor]) -> Tensor:
    """The logits [R, V] after the repetition penalty for the tokens `seen` in each row."""
    if penalty == 1.0:
        return logits
    scores = logits.clone()
    for row, tokens in enumerate(seen):
        tokens = tokens.to(scores.device)
        found = scores[row, tokens]
        scores[row, tokens] = torch.where(found < 0, found * penalty, found / penalty)
    return scores


def _most_probable(scores: Tensor, count: int) -> Tensor:
    """The tokens with the `count` highest scores of each row, [R, count], in the order of the vocabulary."""
    return scores.topk(count)[1].sort(dim=-1)[0]


def _nucleus(given: Choices, top_p: float, keep: int, *, rest: Tensor | None = None) -> Choices:
    """Choices without the least probable tokens that together have no more than 1 - `top_p`; `keep` are left at least.

    `rest`: the probability of what is not among the choices, [R, 1], all of it less probable; None: nothing.
    """
    ascending, order = given.scores.sort(dim=-1, stable=True)
    sums = ascending.softmax(dim=-1).cumsum(dim=-1)
    if rest is not None:
        sums = rest + (1 - rest) * sums
    removed = sums <= 1 - top_p
    removed[:, -keep:] = False
    removed = torch.empty_like(removed).scatter_(-1, order, removed)
    return Choices(given.scores.masked_fill(removed, _REMOVED), given.tokens)
