"""What the slots of a cache hold, so that a prompt that begins like a text in one of them is computed from there on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_llm.tasks.inference.backend import Cache

SHORTEST_PREFIX = 16
"""Fewer tokens in common are computed again: copying has its price too."""


@dataclass(frozen=True)
class Prefix:
    """The first `length` positions of a slot; of length 0 where there is nothing to be had."""

    slot: int
    length: int


class Slots:
    """The slots of a cache: which are free, and the tokens of the positions that each has filled.

    A freed slot keeps its text until another is put there: the next turn of a conversation finds the last one.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._tokens = np.zeros((cache.slots, cache.length), dtype=np.int64)
        self._filled = [0] * cache.slots
        # In the order in which they were freed: the oldest text is overwritten first.
        self._free = list(range(cache.slots))

    @property
    def free(self) -> Sequence[int]:
        """The free slots."""
        return self._free

    def filled(self, slot: int) -> int:
        """How many positions of the slot are filled."""
        return self._filled[slot]

    def prefix(self, prompt: np.ndarray) -> Prefix:
        """The longest beginning of `prompt` that a slot has; never its last token, whose logits are wanted."""
        best = Prefix(0, 0)
        for slot, filled in enumerate(self._filled):
            length = common(self._tokens[slot, :filled], prompt[:-1])
            # Of equal ones a free slot: nothing has to be copied there.
            if length > best.length or (length == best.length and slot in self._free and best.slot not in self._free):
                best = Prefix(slot, length)
        return best if best.length >= SHORTEST_PREFIX else Prefix(0, 0)

    def take(self, prompt: np.ndarray, prefix: Prefix) -> int:
        """A free slot for the prompt, in which this beginning of it is filled."""
        slot = prefix.slot if prefix.length and prefix.slot in self._free else self._free[0]
        self._free.remove(slot)
        if prefix.length and slot != prefix.slot:
            self.cache.copy([prefix.slot], [slot], prefix.length)
            self._tokens[slot, : prefix.length] = prompt[: prefix.length]
        self._filled[slot] = prefix.length
        return slot

    def move(self, slot: int, other: int) -> None:
        """Put a text into the free slot `other`; its own is free then."""
        filled = self._filled[slot]
        self.cache.copy([slot], [other], filled)
        self._tokens[other, :filled] = self._tokens[slot, :filled]
        self._filled[other] = filled
        self._free.remove(other)
        self._free.append(slot)

    def fill(self, slot: int, tokens: Sequence[int] | np.ndarray) -> None:
        """`tokens` have been computed behind what the slot holds."""
        start = self._filled[slot]
        self._tokens[slot, start : start + len(tokens)] = tokens
        self._filled[slot] = start + len(tokens)

    def give_back(self, slot: int) -> None:
        """The text of the slot has ended."""
        self._free.append(slot)


def common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts have in common at their beginning."""
    size = min(len(one), len(other))
    # Most texts differ soon.
    for end in (min(size, SHORTEST_PREFIX), size):
        differs = one[:end] != other[:end]
        if differs.any():
            return int(differs.argmax())
    return size
