"""Where the values of Hugging Face tensors stand in a Megatron tensor of one rank.

A rule is given the Hugging Face tensors that one Megatron tensor is made of and answers with pieces (see `boxes`),
which read the same in both directions. It moves no value itself: hf -> mg, mg -> hf, loading one rank and verification
all follow the same pieces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.boxes import Box, Piece


@dataclass(frozen=True, kw_only=True)
class Part:
    """A Hugging Face tensor, or a section of one, as a rule sees it."""

    name: str
    box: Box
    """The section, in the tensor's view."""
    axes: tuple[int, ...]
    """The axes of the view that the rule sees, in its order."""
    dims: tuple[int, ...]
    """For each of these axes the dimension of the stored Megatron tensor that it is a factor of."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the axes that the rule sees."""
        return tuple(self.box[axis][1] - self.box[axis][0] for axis in self.axes)

    def piece(self, cut: Mapping[int, tuple[int, int]], *, to: Sequence[int], start: Sequence[int]) -> Piece:
        """Say that this part, restricted to the ranges `cut` of its axes, stands at `start` of the Megatron view, with
        its axes running along the axes `to` there.
        """
        hf_box = list(self.box)
        mg_box = [(origin, origin + 1) for origin in start]
        along: list[int | None] = [None] * len(self.box)
        for index, axis in enumerate(self.axes):
            first, last = cut.get(index, (0, self.shape[index]))
            origin = self.box[axis][0]
            hf_box[axis] = (origin + first, origin + last)
            mg_box[to[index]] = (start[to[index]], start[to[index]] + last - first)
            along[axis] = to[index]
        return Piece(tuple(hf_box), tuple(mg_box), tuple(along))


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which share of a tensor a rank has: share `index` of `count`."""

    index: int = 0
    count: int = 1
    padded_vocab_size: int = 0

    def of(self, part: Part, axis: int) -> tuple[int, int]:
        """The range of an axis that is this share of it.

        Raises:
            UserError: the axis does not divide into so many shares.
        """
        size = part.shape[axis]
        if size % self.count:
            raise UserError(
                f"{part.name}: its {size} {_UNITS.get(axis, 'entries')} do not divide over tensor parallel size "
                f"{self.count}; choose a size that divides {size}"
            )
        share = size // self.count
        return self.index * share, (self.index + 1) * share


_UNITS = {0: "rows (heads, groups)", 1: "columns"}


@dataclass(frozen=True, kw_only=True)
class Placed:
    """What a rule answers: a Megatron tensor of one rank."""

    shape: tuple[int, ...]
    view: tuple[int, ...]
    """The shape in which the pieces are boxes; the memory is that of `shape`."""
    pieces: tuple[tuple[str, Piece], ...]
    """(name of a Hugging Face tensor, piece)."""
    padding: Box | None = None
    """A part of the view that no source fills: zeros, dropped on the way back."""


class Rule(Protocol):
    """How one Megatron tensor of one rank is put together."""

    def place(self, parts: Sequence[Part], share: Share) -> Placed:
        """Say where `parts` stand in the tensor that the rank with `share` has."""


@dataclass(frozen=True)
class Joined:
    """Parts one after the other along `axis`, each cut along `split` first; one part is a rename or a plain split.

    gate | up over two ranks, `Joined(split=0)`:    rank 0 [gate 0; up 0]    rank 1 [gate 1; up 1]
    """

    axis: int = 0
    split: int | None = None

    def place(self, parts: Sequence[Part], share: Share) -> Placed:
        """See `Rule`."""
        rank = len(parts[0].shape)
        view, pieces = list(parts[0].shape), []
        end = 0
        for part in parts:
            cut = {} if self.split is None else {self.split: share.of(part, self.split)}
            size = [last - first for first, last in (cut.get(i, (0, n)) for i, n in enumerate(part.shape))]
            start = [end if index == self.axis else 0 for index in range(rank)]
            pieces.append((part.name, part.piece(cut, to=range(rank), start=start)))
            end += size[self.axis]
            view = size
        view[self.axis] = end
        return Placed(shape=_merged(view, parts[0].dims), view=tuple(view), pieces=tuple(pieces))


WHOLE = Joined()
"""One tensor as it is, the same on all ranks; several one below the other."""
ROWS = Joined(split=0)
"""Cut by rows (Megatron's column parallel layers); of several (gate and up) each rank has its rows of each."""
COLUMNS = Joined(split=1)
"""Cut by columns (Megatron's row parallel layers)."""


@dataclass(frozen=True)
class Vocabulary:
    """Rows of an embedding (elements of a bias), padded with zeros at the end to `padded_vocab_size` and then cut."""

    def place(self, parts: Sequence[Part], share: Share) -> Placed:
        """See `Rule`."""
        [part] = parts
        size, *rest = part.shape
        rows = share.padded_vocab_size // share.count
        first, last = share.index * rows, (share.index + 1) * rows
        real = max(min(last, size) - first, 0)
        axes, start = range(len(part.shape)), (0,) * len(part.shape)
        pieces = ((part.name, part.piece({0: (first, first + real)}, to=axes, start=start)),) if real else ()
        padding = ((real, rows), *((0, length) for length in rest)) if real < rows else None
        return Placed(shape=(rows, *rest), view=(rows, *rest), pieces=pieces, padding=padding)


@dataclass(frozen=True)
class GroupedQkv:
    """Query, key and value by KV group: for each group its query heads, its key head, its value head.

    Parts q [heads, head_dim, ...], k and v [groups, head_dim, ...]: ... is hidden for weights, nothing for biases.

        2 groups of 3 heads:    [q0 q1 q2 k0 v0 | q3 q4 q5 k1 v1]      TP 2 cuts between the groups
    """

    def place(self, parts: Sequence[Part], share: Share) -> Placed:
        """See `Rule`."""
        query, key, value = parts
        groups = key.shape[0]
        if groups % share.count:
            raise UserError(
                f"{key.name}: {groups} KV groups do not divide over tensor parallel size {share.count}, a rank would "
                f"cut through a group; choose a tensor parallel size that divides {groups}"
            )
        heads = query.shape[0] // groups
        first, last = share.of(key, 0)
        rest = query.shape[1:]
        view = (last - first, heads + 2, *rest)
        inner = range(2, 2 + len(rest))
        pieces = []
        for group in range(first, last):
            start = (group - first, 0, *(0 for _ in rest))
            pieces.append(
                (query.name, query.piece({0: (group * heads, (group + 1) * heads)}, to=(1, *inner), start=start))
            )
        for index, part in enumerate((key, value)):
            start = (0, heads + index, *(0 for _ in rest))
            pieces.append((part.name, part.piece({0: (first, last)}, to=(0, *inner), start=start)))
        return Placed(shape=_merged(view, (0, *query.dims)), view=view, pieces=tuple(pieces))


@dataclass(frozen=True)
class StackedExperts:
    """All experts of a rank in one tensor, each transposed (grouped GEMM with local names).

    `fan_in` parts per expert stand side by side. Parts are [out, in]; the memory is [experts, in, out], which is stored
    as [in, -1] for the first layer (`weight1`, gate and up) and as [-1, out] for the second (`weight2`). Parts are cut
    along `split`; None leaves them whole.
    """

    fan_in: int
    split: int | None
    first_layer: bool

    def place(self, parts: Sequence[Part], share: Share) -> Placed:
        """See `Rule`."""
        count = len(parts) // self.fan_in
        pieces, end = [], 0
        inputs = outputs = 0
        for index, part in enumerate(parts):
            if index % self.fan_in == 0:
                end = 0
            cut = {} if self.split is None else {self.split: share.of(part, self.split)}
            size = [last - first for first, last in (cut.get(i, (0, n)) for i, n in enumerate(part.shape))]
            pieces.append((part.name, part.piece(cut, to=(2, 1), start=(index // self.fan_in, 0, end))))
            end += size[0]
            inputs, outputs = size[1], end
        shape = (inputs, count * outputs) if self.first_layer else (count * inputs, outputs)
        return Placed(shape=shape, view=(count, inputs, outputs), pieces=tuple(pieces))


STACKED_FC1 = StackedExperts(fan_in=2, split=0, first_layer=True)
STACKED_FC2 = StackedExperts(fan_in=1, split=1, first_layer=False)


def _merged(view: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """The stored shape: the axes of a view that belong to one dimension multiplied."""
    return tuple(
        math.prod(size for size, dim in zip(view, dims, strict=True) if dim == number) for number in sorted(set(dims))
    )
