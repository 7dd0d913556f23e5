"""Log-probabilities of the tokens of prompts, for clients that ask for them with `echo`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mindspeed_llm.tasks.inference.backend import Backend, Batch
from mindspeed_llm.tasks.inference.damage import refuse_damaged

# Elements of the logits of one call, 256 MiB in fp32.
_MOST_LOGITS = 2**26
_MOST_SLOTS = 2

Alternatives = tuple[tuple[int, float], ...]
"""(token, logprob) of the most probable tokens, most probable first."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """A prompt whose tokens are to be looked at."""

    prompt: tuple[int, ...]
    """At least one token, at most as many as the scorer's slots have positions."""
    top_logprobs: int


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What the model makes of a prompt's tokens."""

    logprobs: tuple[float, ...]
    """Natural logarithm of the probability of each token but the first, which nothing stands before."""
    top_logprobs: tuple[Alternatives, ...]
    """The alternatives at each of these tokens."""
    next_token: int
    """The most probable token behind the prompt."""
    next_logprob: float
    next_top_logprobs: Alternatives


@dataclass
class _Row:
    key: int
    scoring: Scoring
    slot: int
    position: int = 0
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Alternatives] = field(default_factory=list)


class Scorer:
    """Scores prompts piece by piece, so that other requests get their turn between the pieces."""

    def __init__(self, backend: Backend, *, slots: int, length: int) -> None:
        """Reserve memory for `slots` prompts (at most 2) of `length` tokens.

        Raises:
            UserError: the memory is not there.
        """
        self._backend = backend
        slots = min(slots, _MOST_SLOTS)
        self._cache = backend.new_cache(slots, length)
        self._free = list(range(slots))
        self._waiting: dict[int, Scoring] = {}
        self._rows: dict[int, _Row] = {}

    @property
    def busy(self) -> bool:
        """Whether there is work left."""
        return bool(self._waiting or self._rows)

    def add(self, key: int, scoring: Scoring) -> None:
        """Queue a prompt; `key` is the caller's number for it."""
        self._waiting[key] = scoring

    def cancel(self, key: int) -> None:
        """Forget a prompt."""
        self._waiting.pop(key, None)
        if (row := self._rows.pop(key, None)) is not None:
            self._free.append(row.slot)

    def step(self) -> list[tuple[int, Scored]]:
        """Score the next piece of each prompt in work; (key, result) of those that are through."""
        while self._free and self._waiting:
            key = next(iter(self._waiting))
            self._rows[key] = _Row(key=key, scoring=self._waiting.pop(key), slot=self._free.pop())
        rows = list(self._rows.values())
        if not rows:
            return []
        most = max(1, _MOST_LOGITS // self._backend.vocab_size // len(rows))
        pieces = [row.scoring.prompt[row.position : row.position + most] for row in rows]
        logprobs = self._forward(rows, pieces)
        found = []
        for row, piece, of_row in zip(rows, pieces, logprobs.split([len(piece) for piece in pieces]), strict=True):
            if (scored := _advance(row, piece, of_row)) is not None:
                found.append((row.key, scored))
                self.cancel(row.key)
        return found

    def _forward(self, rows: Sequence[_Row], pieces: Sequence[Sequence[int]]) -> Tensor:
        """Log-probabilities behind each token of the pieces, [all tokens, vocabulary]."""
        tokens = torch.zeros(len(pieces), max(map(len, pieces)), dtype=torch.int64)
        for place, piece in enumerate(pieces):
            tokens[place, : len(piece)] = torch.tensor(piece, dtype=torch.int64)
        batch = Batch(
            tokens=tokens,
            widths=[len(piece) for piece in pieces],
            slots=[row.slot for row in rows],
            starts=[row.position for row in rows],
            wanted=[(place, column) for place, piece in enumerate(pieces) for column in range(len(piece))],
        )
        logprobs = self._backend.forward(batch, self._cache).log_softmax(dim=-1)
        refuse_damaged(logprobs.amax(dim=-1))
        return logprobs


def _advance(row: _Row, piece: Sequence[int], logprobs: Tensor) -> Scored | None:
    """Take over what the logits behind a piece's tokens say; the result where the prompt ends with the piece."""
    prompt, begin = row.scoring.prompt, row.position
    row.position += len(piece)
    is_last = row.position == len(prompt)
    # Behind the last token of the prompt there is none whose probability could be asked for: the best is named.
    behind = torch.tensor([*prompt[begin + 1 : row.position + 1]], dtype=torch.int64, device=logprobs.device)
    next_token = int(logprobs[-1].argmax())
    if is_last:
        behind = torch.cat([behind, behind.new_tensor([next_token])])
    row.logprobs += logprobs.gather(1, behind[:, None])[:, 0].tolist()
    count = min(row.scoring.top_logprobs, logprobs.shape[1])
    values, tokens = logprobs.topk(count, dim=-1)
    row.top_logprobs += [
        tuple(zip(ids, numbers, strict=True)) for ids, numbers in zip(tokens.tolist(), values.tolist(), strict=True)
    ]
    if not is_last:
        return None
    return Scored(
        logprobs=tuple(row.logprobs[:-1]),
        top_logprobs=tuple(row.top_logprobs[:-1]),
        next_token=next_token,
        next_logprob=row.logprobs[-1],
        next_top_logprobs=row.top_logprobs[-1],
    )
