"""A model with a LoRA adapter merged into it: W + alpha / r * B A, given out while it is read."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import dimensions
from mindspeed_llm.tasks.checkpoint.adapter import Adapter, as_target
from mindspeed_llm.tasks.checkpoint.boxes import Box, intersect, shape_of, take, whole
from mindspeed_llm.tasks.checkpoint.lora import split_name
from mindspeed_llm.tasks.checkpoint.model import HfTensor
from mindspeed_llm.tasks.checkpoint.slabs import assemble, slabs
from mindspeed_llm.tasks.checkpoint.sources import Fragment, Source

_BLOCK = 2**16
"""Elements that are summed up at a time: in float64 they stay in a core's cache."""
_SEED = 0


@dataclass(frozen=True, kw_only=True)
class _Delta:
    """What an adapter adds to a tensor, or to a section of it."""

    box: Box
    """The section, in the tensor's view."""
    b: HfTensor
    a: HfTensor
    row_axes: tuple[int, ...]
    """The axes of the tensor's view that are B's rows, in order; the last ones are A's columns."""


class MergedSource:
    """A model's source with an adapter merged into its tensors.

    An element is w + scale * sum over k of b_k * a_k. The sum runs over k from first to last, one element at a time,
    in float64, in which the products of float32 are exact; then it is multiplied and added. It is given out in float64:
    whoever puts it into place rounds it once, to the dtype that is written there. So it depends on nothing but w, b and
    a; a product of matrices would not promise that, since its order of summation may depend on the part that is asked
    for.

    Raises:
        UserError: the adapter is for a tensor that the model has not, or that is not in floating point.
    """

    def __init__(self, base: Source, tensors: Mapping[str, HfTensor], adapter: Adapter) -> None:
        self._base, self._adapter = base, adapter
        self._deltas: dict[str, list[_Delta]] = defaultdict(list)
        sections = {place.target: place.section for place in adapter.places if place.section is not None}
        available = base.names()
        for name, b in adapter.tensors.items():
            found = split_name(name)
            if found is None or found.half == "A":
                continue
            weight = tensors.get(found.weight)
            if weight is None or found.weight not in available:
                raise UserError(
                    f"{adapter.folder} has an adapter for {found.weight}, which the model has not; check that they "
                    "belong together"
                )
            if not base.dtype(found.weight).is_floating_point:
                raise UserError(f"{found.weight} is {base.dtype(found.weight)}; expected floating point to merge into")
            a = adapter.tensors[found.other()]
            box, rows = list(whole(weight.view)), []
            for axis in range(len(box) - len(a.view) + 1):
                chosen = sections[found.section].get(axis) if found.section else None
                if isinstance(chosen, int):
                    box[axis] = (chosen, chosen + 1)
                    continue
                if isinstance(chosen, tuple):
                    start, stop = (dimensions.value(word, adapter.settings, adapter.base.dimensions) for word in chosen)
                    box[axis] = (start, stop)
                rows.append(axis)
            self._deltas[found.weight].append(_Delta(box=tuple(box), b=b, a=a, row_axes=tuple(rows)))

    def names(self) -> set[str]:
        """See `Source`."""
        return self._base.names()

    def dtype(self, name: str) -> torch.dtype:
        """See `Source`."""
        return self._base.dtype(name)

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """See `Source`."""
        if name not in self._deltas:
            yield from self._base.read(name, box)
            return
        for part, values in self._base.read(name, box):
            merged = values.to(torch.float64, memory_format=torch.contiguous_format, copy=True)
            for delta in self._deltas[name]:
                shared = intersect(delta.box, part)
                if shared is not None:
                    inside = tuple((a - start, b - start) for (a, b), (start, _) in zip(shared, part, strict=True))
                    take(merged, inside).copy_(self._sum(delta, shared, take(values, inside)))
            yield part, merged

    def fragments(self, name: str, box: Box) -> Iterator[Fragment]:
        """See `Source`: where the tensor itself stands."""
        return self._base.fragments(name, box)

    def _sum(self, delta: _Delta, box: Box, weight: torch.Tensor) -> torch.Tensor:
        """The merged values of a box inside of a delta's section."""
        rows = tuple((box[axis][0] - delta.box[axis][0], box[axis][1] - delta.box[axis][0]) for axis in delta.row_axes)
        columns = box[len(box) - len(delta.a.view) + 1 :]
        rank = (0, self._adapter.rank)
        b = self._half(delta.b, (*rows, rank)).flatten(0, -2)
        a = self._half(delta.a, (rank, *columns)).flatten(1)
        flat = weight.reshape(b.shape[0], a.shape[1])
        found = torch.empty(flat.shape, dtype=torch.float64)
        step = max(_BLOCK // max(a.shape[1], 1), 1)
        for start in range(0, b.shape[0], step):
            block = slice(start, start + step)
            total = torch.zeros(found[block].shape, dtype=torch.float64)
            for k in range(self._adapter.rank):
                total.addcmul_(b[block, k : k + 1], a[k : k + 1])
            found[block] = total.mul_(self._adapter.scale).add_(flat[block])
        return found.view(shape_of(box))

    def _half(self, tensor: HfTensor, box: Box) -> torch.Tensor:
        return assemble(as_target(tensor, self._adapter.source), box, self._adapter.source).double()


def check_same(
    own: Source, base: Source, tensors: Mapping[str, HfTensor], *, full: bool, folder: str, load_dir: str
) -> None:
    """Compare the weights that stand beside an adapter with those that it is merged into.

    Args:
        own: the weights beside the adapter.
        base: those that it is merged into.
        tensors: of the model.
        full: all of them, instead of a part of each.

    Raises:
        UserError: they differ; says which, and what to do.
    """
    chance = random.Random(_SEED)
    for name in sorted(own.names() & base.names() & tensors.keys()):
        dtype = min((own.dtype(name), base.dtype(name)), key=lambda each: each.itemsize)
        boxes = list(slabs(as_target(tensors[name], base), 2**20))
        for box in boxes if full or not boxes else [chance.choice(boxes)]:
            one, other = (assemble(as_target(tensors[name], source), box, source).to(dtype) for source in (own, base))
            if not torch.equal(one.nan_to_num(), other.nan_to_num()):
                raise UserError(
                    f"{folder} holds another {name} beside its adapter than {load_dir}: the adapter was trained on "
                    "other weights. To merge it into those that it was trained on, give its folder as --load-dir, "
                    "without --lora-load"
                )
