"""What generation and scoring need of a model: logits, and a memory for keys and values. One adapter per backend.

All that chooses tokens (sampling, beam search, batching, stops, likelihoods) is written once above this interface.
Several ranks that share one copy of a model make the same calls with the same arguments, and get the same logits bit
for bit, so that all of them choose the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    """Keys and values of texts in work, one text per slot. How many positions of a slot are filled is known to the
    caller alone, who names it with every call; what stands behind them is never seen.
    """

    slots: int
    length: int
    """Positions of a slot."""

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Put the first `length` positions of slot sources[n] into slot targets[n], for all n at once: a slot may be
        source and target of different pairs (beams change places).
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Batch:
    """New tokens of some texts, each at its own place."""

    tokens: Tensor
    """[R, W], int64, on the CPU: the new tokens of each text, filled up on the right with any token."""
    widths: Sequence[int]
    """How many of a row's tokens are real, from 1 to W."""
    slots: Sequence[int]
    """The slot of the cache that each row's text is in; no slot twice."""
    starts: Sequence[int]
    """The positions of each slot that are filled: a row's first token is at position starts[n] of its text."""
    wanted: Sequence[tuple[int, int]]
    """(row, column of tokens) of the tokens after which logits are wanted, at least one."""


class Backend(Protocol):
    """A causal language model on this rank, or this rank's part of one."""

    vocab_size: int
    """Tokens that there are; what only fills up the embedding is none of them."""
    max_length: int
    """Positions that the model has for a text, new tokens included."""
    device: torch.device
    """Where logits are."""
    replica: int
    """Which copy of the model this rank has a part of, from 0."""
    replicas: int
    """Copies of the model that the job has. Each may work on other texts at its own pace."""
    is_first_of_replica: bool
    """Whether this rank speaks for its copy (writes files, answers clients)."""

    def new_cache(self, slots: int, length: int) -> Cache:
        """A cache for so many texts of so many tokens; raises UserError where the memory is not there."""
        ...

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        """The logits after the wanted tokens, fp32, [len(wanted), vocab_size], on `device`; fills the cache.

        No gradient is recorded. A row sees the filled positions of its slot and its own tokens up to each one.
        """
        ...
