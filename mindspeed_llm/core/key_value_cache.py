"""Keys and values of texts in work, kept for the attention layers of one pipeline stage.

A text has a slot of its own. The last position of a slot is never seen: tokens that only fill up a row leave theirs
there.

    slot 0    a a a a . . . . x
    slot 1    b b b b b b b . x

Shape letters: R rows of a batch, S new tokens of each, T positions that are seen, G KV heads of this rank, D head
dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from mindspeed_llm.core.attention import CoreAttention
    from mindspeed_llm.core.rotary import ScaledRotaryEmbedding


class Rows:
    """Where the new tokens of a batch stand, and which positions they see; worked out once for all layers."""

    def __init__(
        self,
        *,
        slots: Sequence[int],
        starts: Sequence[int],
        widths: Sequence[int],
        columns: int,
        length: int,
        device: torch.device,
    ) -> None:
        """Args: those of `tasks.inference.backend.Batch`; `columns` is S, and `length` the positions of a slot."""
        ends = [start + width for start, width in zip(starts, widths, strict=True)]
        assert max(ends) <= length, f"a text of {max(ends)} tokens in a slot of {length}"
        self.columns = columns
        self.end = max(ends)
        """The filled positions of the longest text, its new tokens included."""
        # Texts of one length need no mask; what fills up their rows stands behind all that is seen of them.
        self.start = starts[0] if len(set(starts)) == 1 and starts[0] + columns <= length else None
        """The filled positions before the new tokens, where those of all rows are as many."""
        self.first_start = min(starts)
        self._slots = _run(slots)
        self._slot_numbers = torch.tensor(slots, device=device)
        column = torch.arange(columns)
        true = torch.tensor(starts)[:, None] + column
        last = torch.tensor(ends)[:, None] - 1
        # What fills up a row goes by the position of its last token, which the model surely has.
        self.positions = torch.minimum(true, last).to(device)
        """[R, S], of the tokens in their texts."""
        self._places = torch.where(true <= last, true, length).to(device)
        self._visible: dict[int | None, tuple[int, Tensor | None]] = {}

    def store(self, kept: Tensor, new: Tensor) -> None:
        """Put new keys or values [S, R, G, D] to their places in `kept` [slots, G, length + 1, D]."""
        if self.start is not None and isinstance(self._slots, slice):
            kept[self._slots, :, self.start : self.start + self.columns] = new.permute(1, 2, 0, 3)
        else:
            kept[self._slot_numbers[:, None], :, self._places] = new.transpose(0, 1)

    def seen(self, kept: Tensor, new: Tensor, first: int) -> Tensor:
        """[R, G, T, D], from position `first` on; a view of what is kept wherever slots are neighbours."""
        if self.start == 0:
            return new.permute(1, 2, 0, 3)
        end = self.end if self.start is None else self.start + self.columns
        if isinstance(self._slots, slice):
            return kept[self._slots, :, first:end]
        return kept[:, :, first:end].index_select(0, self._slot_numbers)

    def visible(self, window: int | None) -> tuple[int, Tensor | None]:
        """The first position that any token sees, and bool [R or 1, 1, S, T], True where a token sees a position; None
        where each sees all up to its own.

        Args:
            window: tokens that a token sees before itself; None: all.
        """
        if window not in self._visible:
            self._visible[window] = self._make_visible(window)
        return self._visible[window]

    def _make_visible(self, window: int | None) -> tuple[int, Tensor | None]:
        if self.start == 0:
            first = 0
        else:
            first = 0 if window is None else max(self.first_start - window, 0)
        device = self.positions.device
        if self.start is not None:
            end = self.start + self.columns
            if window is None or self.columns == 1 or window >= end - 1:
                return first, None
            own = torch.arange(self.start, end, device=device)[None]
        else:
            end, own = self.end, self.positions
        seen = torch.arange(first, end, device=device)
        mask = seen <= own[..., None]
        if window is not None:
            mask &= own[..., None] - seen <= window
        return first, mask[:, None]


class LayerMemory:
    """What one attention layer has of a cache while it works on a batch."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Rows) -> None:
        """Args: keys and values of all slots [slots, G, length + 1, D]."""
        self._keys, self._values, self._rows = keys, values, rows

    def extended(self, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keep keys and values [S, R, G, D] of new tokens, and give all that these see.

        Returns:
            keys and values [R, G, T, D], and which of them each token sees, see `Rows.visible`.
        """
        rows = self._rows
        first, mask = rows.visible(window)
        rows.store(self._keys, key)
        rows.store(self._values, value)
        return rows.seen(self._keys, key, first), rows.seen(self._values, value, first), mask


class KeyValueCache:
    """Keys and values of the attention layers of one model part, see `tasks.inference.backend.Cache`."""

    def __init__(
        self,
        layers: int,
        *,
        slots: int,
        length: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Args: `layers` have `heads` KV heads each on this rank.

        Raises:
            RuntimeError: the device's allocator has not so much memory.
        """
        self.slots, self.length = slots, length
        # Zeros: what is not seen has a weight of zero, which would make NaN of what memory may hold by chance.
        self.layers = [
            tuple(torch.zeros(slots, heads, length + 1, head_dim, dtype=dtype, device=device) for _ in range(2))
            for _ in range(layers)
        ]

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """See `Cache.copy`."""
        pairs = [pair for pair in zip(sources, targets, strict=True) if pair[0] != pair[1]]
        if not pairs or not length or not self.layers:
            return
        device = self.layers[0][0].device
        come_from, go_to = (torch.tensor(numbers, device=device) for numbers in zip(*pairs, strict=True))
        for kept in (tensor for layer in self.layers for tensor in layer):
            # Indexing copies, so that no slot is written before it has been read.
            kept[go_to, :, :length] = kept[come_from, :, :length]


@contextlib.contextmanager
def remembering(
    layers: Sequence[CoreAttention], rotary: ScaledRotaryEmbedding | None, cache: KeyValueCache, rows: Rows
) -> Iterator[None]:
    """A context in which attention layers (`attention_layers` of a model) read and fill a cache, and the rotary
    positions of the model are those of `rows`.
    """
    try:
        for layer, (keys, values) in zip(layers, cache.layers, strict=True):
            layer.memory = LayerMemory(keys, values, rows)
        if rotary is not None:
            rotary.positions = rows.positions
        yield
    finally:
        for layer in layers:
            layer.memory = None
        if rotary is not None:
            rotary.positions = None


def attention_layers(model: nn.Module) -> list[CoreAttention]:
    """The cores of attention of a model part, in order."""
    from mindspeed_llm.core.attention import CoreAttention

    return [module for module in model.modules() if isinstance(module, CoreAttention)]


def _run(slots: Sequence[int]) -> slice | None:
    """Slots that stand one behind the other, as a slice."""
    is_run = all(slot == slots[0] + n for n, slot in enumerate(slots))
    return slice(slots[0], slots[0] + len(slots)) if is_run else None
