"""The values of target tensors, by slabs: runs of bytes that are put together from parts of the source.

A slab is at most `SLAB_BYTES` large, so that memory depends neither on the size of tensors nor on their number. A slab
that is one unbroken run of its source, too, is a view of the mapped file, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from mindspeed_llm.errors import UserError
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
    """The values of one slab, contiguous: a view of the source where that is possible.

    Raises:
        UserError: finite values would become infinite in the target's type.
    """
    buffer: torch.Tensor | None = None
    shape = shape_of(slab)
    for name, piece in target.pieces:
        clipped = piece.clip_mg(slab)
        if clipped is None:
            continue
        for hf_box, values in source.read(name, clipped.hf_box):
            ordered = clipped.as_mg(values, len(shape))
            if ordered.dtype == torch.float64:
                ordered = rounded(ordered, target.dtype)
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
            part = take(buffer, place)
            _copy(part, ordered)
            if values.dtype != target.dtype and target.dtype.is_floating_point:
                _refuse_overflow(part, clipped.as_mg(values, len(shape)), name)
    return torch.zeros(shape, dtype=target.dtype) if buffer is None else buffer


def _refuse_overflow(written: torch.Tensor, values: torch.Tensor, name: str) -> None:
    """Refuse numbers that the type that is written has no room for: they would be infinite."""
    if not written.numel():
        return
    # One pass without a copy, which answers for nearly all slabs.
    low, high = torch.aminmax(written)
    if low.isfinite() and high.isfinite():
        return
    lost = ~written.isfinite() & values.isfinite()
    if lost.any():
        dtype = str(written.dtype).removeprefix("torch.")
        raise UserError(
            f"{name} has values that {dtype} has no room for, such as {float(values[lost][0]):g} (at most "
            f"{torch.finfo(written.dtype).max:g}); choose another --params-dtype, such as bf16"
        )


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


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values in float64 as `dtype`, rounded once. torch goes to 16 bit by way of float32, and would round twice."""
    if dtype.itemsize >= torch.float32.itemsize:
        return values.to(dtype)
    near = values.float()
    back = near.double()
    # Rounded to odd: towards zero, with the last bit set where something was cut off. The last bit of 24 decides
    # between two values of 11 or 8 bits only where they would tie.
    bits = near.view(torch.int32)
    bits = torch.where(back.abs() > values.abs(), bits - 1, bits)
    bits = torch.where(back != values, bits | 1, bits)
    return bits.view(torch.float32).to(dtype)
