"""A backend that keeps texts instead of keys and values, and asks a transformers model about each whole text alone.

Nothing is shared, batched or filled up in it: what is wrong in the bookkeeping of a caller is wrong in its numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mindspeed_llm.tasks.inference.backend import Batch


class PlainCache:
    """Token ids by slot; unfilled positions hold -1, which no model takes."""

    def __init__(self, slots: int, length: int) -> None:
        self.slots, self.length = slots, length
        self.tokens = torch.full((slots, length), -1, dtype=torch.int64)
        self.num_copied = 0

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        assert len(set(targets)) == len(targets)
        self.tokens[list(targets), :length] = self.tokens[list(sources), :length].clone()
        self.num_copied += len(targets) * length


class PlainBackend:
    """See the module. `batches` has what was asked, in order."""

    def __init__(self, model: nn.Module, *, max_length: int | None = None) -> None:
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.max_length = max_length or model.config.max_position_embeddings
        self.device = torch.device("cpu")
        self.replica, self.replicas, self.is_first_of_replica = 0, 1, True
        self.batches: list[Batch] = []
        self.caches: list[PlainCache] = []

    def new_cache(self, slots: int, length: int) -> PlainCache:
        assert slots > 0 and 0 < length <= self.max_length
        self.caches.append(PlainCache(slots, length))
        return self.caches[-1]

    @torch.no_grad()
    def forward(self, batch: Batch, cache: PlainCache) -> Tensor:
        assert len(set(batch.slots)) == len(batch.slots) == len(batch.widths) == len(batch.starts) == len(batch.tokens)
        assert batch.tokens.shape[1] == max(batch.widths) and min(batch.widths) > 0
        self.batches.append(batch)
        texts = []
        for row, width, slot, start in zip(batch.tokens, batch.widths, batch.slots, batch.starts, strict=True):
            cache.tokens[slot, start : start + width] = row[:width]
            cache.tokens[slot, start + width :] = -1  # whoever counts on what stood there gets no answer
            texts.append(cache.tokens[slot, : start + width])
        logits = {row: self.model(texts[row][None]).logits[0] for row in {row for row, _ in batch.wanted}}
        return torch.stack([logits[row][batch.starts[row] + column] for row, column in batch.wanted]).float()

    @property
    def num_tokens(self) -> int:
        """Tokens that were computed, filling left out."""
        return sum(sum(batch.widths) for batch in self.batches)
