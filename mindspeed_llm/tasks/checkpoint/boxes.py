"""Rectangular parts of tensors, and which part of one tensor is which part of another.

Everything that conversion knows about values is a list of `Piece`: "this box of that Hugging Face tensor is this box of
this Megatron tensor". A piece reads the same in both directions, so a rule says where values stand only once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

Box = tuple[tuple[int, int], ...]
"""For each axis, the first index and the one after the last."""


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """The lengths of a box along its axes."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(shape_of(box))


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share; None where that is nothing."""
    shared = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def take(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a tensor in a box, as a view."""
    for axis, (start, stop) in enumerate(box):
        if start != 0 or stop != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, stop - start)
    return tensor


def gap(boxes: Iterable[Box], shape: Sequence[int]) -> str | None:
    """How `boxes` fail to cover a tensor of `shape` with each element exactly once; None where they do.

    Boxes that are equal count once: the same part may stand in several files.
    """
    distinct = sorted(set(boxes))
    if not math.prod(shape):
        return None
    if any(start < 0 or stop > size for box in distinct for (start, stop), size in zip(box, shape, strict=True)):
        return f"a part lies outside of the shape {list(shape)}"
    covered = sum(volume(box) for box in distinct)
    for i, box in enumerate(distinct):
        for other in distinct[i + 1 :]:
            if other[0][0] >= box[0][1]:
                break  # sorted by where they start: none of the rest can overlap
            if intersect(box, other) is not None:
                return f"parts {box} and {other} overlap"
    total = math.prod(shape)
    return None if covered == total else f"{covered} of {total} elements"


@dataclass(frozen=True, slots=True)
class Piece:
    """One box that a Hugging Face tensor and a Megatron tensor have in common.

    Boxes lie in the tensors' views, in which an axis may be cut in two ([heads * head_dim, hidden] as [heads, head_dim,
    hidden]). `axes` names for each axis of the Hugging Face view the axis of the Megatron view along which it runs;
    None where the box has length one along it. Axes of the Megatron view that are not named have length one in the box.
    """

    hf_box: Box
    mg_box: Box
    axes: tuple[int | None, ...]

    def to_mg(self, hf_part: Box) -> Box:
        """Where a part of `hf_box` stands in the Megatron view."""
        box = list(self.mg_box)
        for (start, stop), (origin, _), axis in zip(hf_part, self.hf_box, self.axes, strict=True):
            if axis is not None:
                shift = self.mg_box[axis][0] - origin
                box[axis] = (start + shift, stop + shift)
        return tuple(box)

    def clip_mg(self, part: Box) -> Piece | None:
        """The piece restricted to a part of the Megatron view; None where it does not reach into it."""
        shared = intersect(self.mg_box, part)
        if shared is None:
            return None
        hf_box = list(self.hf_box)
        for index, axis in enumerate(self.axes):
            if axis is not None:
                shift = self.hf_box[index][0] - self.mg_box[axis][0]
                hf_box[index] = (shared[axis][0] + shift, shared[axis][1] + shift)
        return Piece(tuple(hf_box), shared, self.axes)

    def as_hf(self, mg_part: torch.Tensor) -> torch.Tensor:
        """A view of `mg_part`, a part of the Megatron view inside `mg_box`, with the axes of the Hugging Face view."""
        named = [axis for axis in self.axes if axis is not None]
        spare = [axis for axis in range(mg_part.dim()) if axis not in named]
        view = mg_part.permute(*named, *spare)
        view = view.squeeze(tuple(range(len(named), view.dim()))) if spare else view
        for index, axis in enumerate(self.axes):
            if axis is None:
                view = view.unsqueeze(index)
        return view

    def as_mg(self, hf_part: torch.Tensor, mg_rank: int) -> torch.Tensor:
        """A view of `hf_part`, a part of the Hugging Face view inside `hf_box`, with the axes of the Megatron view."""
        order = sorted((axis, index) for index, axis in enumerate(self.axes) if axis is not None)
        spare = [index for index, axis in enumerate(self.axes) if axis is None]
        view = hf_part.permute(*(index for _, index in order), *spare)
        view = view.squeeze(tuple(range(len(order), view.dim()))) if spare else view
        named = {axis for axis, _ in order}
        for axis in range(mg_rank):
            if axis not in named:
                view = view.unsqueeze(axis)
        return view


def identity(shape: Sequence[int]) -> Piece:
    """The piece that says: these two tensors are the same."""
    return Piece(whole(shape), whole(shape), tuple(range(len(shape))))
