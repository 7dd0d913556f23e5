"""Greedy generation without a cache: each token is found by a forward pass over all that is before it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

NextTokens = Callable[[Sequence[Sequence[int]]], Sequence[int]]
"""Rows of token ids, of any lengths from 1 on -> the most probable next token of each row, or NO_TOKEN.

Of a model that is spread over ranks all must call it at the same place with the same rows, and all get the same tokens.
"""


NO_TOKEN = -1
"""Stands for the next token where the largest logit is NaN or infinite: no token is the most probable one."""
FinishReason = Literal["stop", "length", "nan"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What follows a prompt; the token that ended it is left out."""

    ids: list[int]
    finish_reason: FinishReason
    """`nan`: the model's logits are no numbers. A run may go on with such a model, so this is no error."""


def greedy_answers(
    prompts: Sequence[Sequence[int]],
    next_tokens: NextTokens,
    *,
    max_new_tokens: int,
    max_length: int,
    stop_ids: Collection[int],
) -> list[Answer]:
    """The answer to each prompt: its most probable tokens, one after the other.

    Args:
        prompts: token ids; shorter than `max_length`.
        next_tokens: the model.
        max_new_tokens: tokens of an answer, at most.
        max_length: tokens of a prompt and its answer together, at most.
        stop_ids: tokens that end an answer.
    """
    rows = [list(prompt) for prompt in prompts]
    limits = [min(len(row) + max_new_tokens, max_length) for row in rows]
    reasons: list[FinishReason] = ["length"] * len(rows)
    # Rows that have ended are left out of the batch.
    while going := [n for n, row in enumerate(rows) if reasons[n] == "length" and len(row) < limits[n]]:
        for number, token in zip(going, next_tokens([rows[n] for n in going]), strict=True):
            if token == NO_TOKEN:
                reasons[number] = "nan"
            elif token in stop_ids:
                reasons[number] = "stop"
            else:
                rows[number].append(token)
    return [
        Answer(ids=row[len(prompt) :], finish_reason=reason)
        for row, prompt, reason in zip(rows, prompts, reasons, strict=True)
    ]


def padded(rows: Sequence[Sequence[int]], length: int) -> torch.Tensor:
    """Rows as a tensor [rows, length], int64, filled up on the right with token 0, which nothing before it sees."""
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return tokens
