"""The values of target tensors, by slabs: runs of bytes that are put together from parts of the source.

A slab is at most `SLAB_BYTES` large, so that memory depends neither on the size of tensors nor on their number. A slab
that is one unbroken run of its source, too, is a view of the mapped file, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from mindspeed_llm.tasks.checkpoint.boxes import Box, shape_of, take, whole
from mindspeed_llm.tasks.checkpoint.plan import Target
from mindspeed_llm.tasks.checkpoint.sources import Source

SLAB_BYTES = 8 * 2**20


def slabs(target: Target, limit: int = SLAB_BYTES) -> Iterator[Box]:
    """Cut a tensor's view into boxes that are runs of its memory, of at most `limit` bytes (or one row)."""
    if not target.view:
        yield ()
    elif math.prod(target.view):
        yield from _slabs(whole(target.view), 0, limit // target.dtype.itemsize)


def _slabs(box: Box, axis: int, limit: int) -> Iterator[Box]:
    row = math.prod(shape_of(box)[axis + 1 :])
    start, stop = box[axis]
    if row > limit and axis + 1 < len(box):
        for index in range(start, stop):
            yield from _slabs((*box[:axis], (index, index + 1), *box[axis + 1 :]), axis + 1, limit)
        return
    step = max(limit // row, 1)
    for begin in range(start, stop, step):
        yield (*box[:axis], (begin, min(begin + step, stop)), *box[axis + 1 :])


def slab_at(target: Target, index: int, limit: int) -> Box:
    """The one of `slabs(target, limit)` that has the element of this row-major index."""
    box: list[tuple[int, int]] = []
    limit //= target.dtype.itemsize
    for axis, size in enumerate(target.view):
        row = math.prod(target.view[axis + 1 :])
        at, index = divmod(index, row)
        if row <= limit or axis + 1 == len(target.view):
            step = max(limit // row, 1)
            begin = at // step * step
            return (*box, (begin, min(begin + step, size)), *whole(target.view[axis + 1 :]))
        box.append((at, at + 1))
    return ()


def slab_start(view: Sequence[int], slab: Box) -> int:
    """The row-major index of a slab's first element."""
    index = 0
    for size, (start, _) in zip(view, slab, strict=True):
        index = index * size + start
    return index


def assemble(target: Target, slab: Box, source: Source) -> torch.Tensor:
    """The values of one slab, contiguous: a view of the source where that is possible."""
    buffer: torch.Tensor | None = None
    shape = shape_of(slab)
    for name, piece in target.pieces:
        clipped = piece.clip_mg(slab)
        if clipped is None:
            continue
        for hf_box, values in source.read(name, clipped.hf_box):
            ordered = clipped.as_mg(values, len(shape))
            whole_slab = ordered.numel() == math.prod(shape) and ordered.dtype == target.dtype
            if whole_slab and ordered.is_contiguous():
                return ordered
            if buffer is None:
                buffer = torch.empty(shape, dtype=target.dtype)
                if target.padding is not None:
                    buffer.zero_()
            place = tuple(
                (start - origin, stop - origin)
                for (start, stop), (origin, _) in zip(clipped.to_mg(hf_box), slab, strict=True)
            )
            _copy(take(buffer, place), ordered)
    return torch.zeros(shape, dtype=target.dtype) if buffer is None else buffer


def _copy(into: torch.Tensor, values: torch.Tensor) -> None:
    """Copy, also where one of them is a transposed matrix: torch has a fast way to turn a contiguous matrix over into a
    contiguous one, and is three times slower where either is part of something larger.
    """
    matrix = values.squeeze()
    if matrix.dim() != 2 or matrix.stride(0) != 1:
        into.copy_(values)
        return
    into = into.squeeze()
    packed = matrix.t().contiguous().t()
    into.copy_(packed if into.is_contiguous() else packed.contiguous())
