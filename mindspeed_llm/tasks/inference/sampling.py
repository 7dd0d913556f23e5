"""From logits to the next token: repetition penalty, temperature, top-k and top-p as transformers has them, and a draw.

A token is drawn by one number in [0, 1): it is the first whose probability, added to those of all tokens before it in
the vocabulary, passes that number. So a draw takes one random number of the request's own, whatever the size of the
vocabulary, and rows of one batch know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.generation import Sampling

_REMOVED = float("-inf")


def check(sampling: Sampling) -> None:
    """Raise UserError for a value that no distribution can be made with."""
    if not sampling.repetition_penalty > 0:
        raise UserError(f"repetition penalty is {sampling.repetition_penalty}; expected a number above 0 (1: off)")
    if not 0 < sampling.temperature < float("inf"):
        raise UserError(
            f"temperature is {sampling.temperature}; expected a number above 0 (for the most probable token each time, "
            "choose greedy decoding)"
        )
    if sampling.top_k < 0:
        raise UserError(f"top-k is {sampling.top_k}; expected a number of tokens, or 0 for all")
    if not 0 <= sampling.top_p <= 1:
        raise UserError(f"top-p is {sampling.top_p}; expected a probability from 0 to 1 (1 and 0: all tokens)")
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
        scores = processed(logits[rows], kind, [samplers[row].seen() for row in rows] if _is_penalised(kind) else ())
        if kind.do_sample:
            numbers = torch.tensor([samplers[row].uniform() for row in rows], dtype=torch.float64)
            tokens[rows] = drawn(scores, numbers)
        else:
            tokens[rows] = scores.argmax(dim=-1)
    return tokens


def processed(logits: Tensor, sampling: Sampling, seen: Sequence[Tensor]) -> Tensor:
    """The scores of rows [R, V] that are all sampled alike, as transformers' logits processors give them: removed
    tokens have minus infinity.

    Args:
        logits: left as they are.
        seen: the different tokens of each row's text, where there is a repetition penalty.
    """
    scores = logits
    if _is_penalised(sampling):
        scores = scores.clone()
        for row, tokens in enumerate(seen):
            tokens = tokens.to(scores.device)
            found = scores[row, tokens]
            penalty = sampling.repetition_penalty
            scores[row, tokens] = torch.where(found < 0, found * penalty, found / penalty)
    if not sampling.do_sample:
        return scores
    if sampling.temperature != 1.0:
        scores = scores / sampling.temperature
    top_k = min(sampling.top_k, scores.shape[-1])
    if top_k:
        scores = scores.masked_fill(scores < scores.topk(top_k)[0][:, -1:], _REMOVED)
    if 0 < sampling.top_p < 1:
        scores = _nucleus(scores, sampling.top_p, top_k)
    return scores


def drawn(scores: Tensor, numbers: Tensor) -> Tensor:
    """One token of each row, [R]: drawn from softmax(scores [R, V]) by `numbers` [R] in [0, 1), float64."""
    # In double precision: sums over a large vocabulary would move the borders between tokens.
    sums = scores.double().softmax(dim=-1).cumsum(dim=-1)
    # The whole is not exactly 1. A token of probability 0 ends where the one before it does, and is never the first
    # beyond a number.
    numbers = numbers.to(sums.device)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, numbers, right=True)[:, 0]


def _is_penalised(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1.0


def _nucleus(scores: Tensor, top_p: float, top_k: int) -> Tensor:
    """Scores with all but the most probable tokens removed, whose probabilities just reach `top_p`."""
    if not top_k:
        return scores.masked_fill(_outside(scores, top_p), _REMOVED)
    # What top-k has left (more than k tokens where the last are equal) is all that is to be sorted; in the order of the
    # vocabulary, so that of equal ones the same are removed as if all were sorted.
    most = int((scores > _REMOVED).sum(dim=-1).max())
    places = scores.topk(most)[1].sort(dim=-1)[0]
    few = scores.gather(-1, places)
    return scores.scatter(-1, places, few.masked_fill(_outside(few, top_p), _REMOVED))


def _outside(scores: Tensor, top_p: float) -> Tensor:
    """Which scores are of the least probable tokens that together have no more than 1 - `top_p`."""
    ascending, order = scores.sort(dim=-1, stable=True)
    removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    removed[:, -1] = False
    return torch.empty_like(removed).scatter_(-1, order, removed)
