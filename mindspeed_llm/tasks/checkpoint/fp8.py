"""Weights in block-wise fp8 (as DeepSeek-V3, GLM-5, MiniMax-M2, Qwen3 are published), dequantised while they are read.

Beside a matrix X in float8_e4m3fn stands X_scale_inv with one number for each block of it; blocks at the ends may be
smaller. A weight is its fp8 value times the number of its block (what is inverse is the scale's use in quantising):

    X [200, 300], blocks [128, 128]          X_scale_inv [2, 3]
      columns   0-127   128-255   256-299
    rows   0-127  s00       s01       s02
    rows 128-199  s10       s11       s12

The product is taken in fp32 and given out as it is. Whoever puts it into place rounds it to what is wanted there, so
that bf16 is rounded once, as in the bf16 copies that are published, and fp32 and fp16 do not pass through bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.boxes import Box, take
from mindspeed_llm.tasks.checkpoint.hf_reader import StoredHf
from mindspeed_llm.tasks.checkpoint.model import HfTensor
from mindspeed_llm.tasks.checkpoint.sources import Fragment, HfSource

SCALE = "_scale_inv"
_STORED = torch.float8_e4m3fn
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_VALUES = torch.arange(256, dtype=torch.uint8).view(_STORED).float()
"""The value of each byte. Looking it up is five times faster than torch's conversion."""
_PART_ELEMENTS = 2**18
"""What is computed at once: little enough to stay in a core's cache."""


def is_fp8(stored: Mapping[str, StoredHf]) -> bool:
    """Whether a directory holds anything in fp8, or scales of such tensors."""
    return any(_is_float8(tensor.dtype) or name.endswith(SCALE) for name, tensor in stored.items())


class Fp8Source:
    """A Hugging Face directory in which some matrices are in block-wise fp8; these count as bfloat16.

    All scales are read and checked, so that nothing is written for a model that cannot be dequantised.

    Args:
        block: rows and columns of a block.

    Raises:
        UserError: names file and tensor: a tensor in fp8 without scales, or scales without one; of another shape or
            dtype than they must have; scales that are no positive numbers.
    """

    def __init__(
        self, stored: Mapping[str, StoredHf], expected: Mapping[str, HfTensor], block: tuple[int, int]
    ) -> None:
        self._expected, self._block = expected, block
        scales = {name for name in stored if name.endswith(SCALE)}
        self._stored = {name: tensor for name, tensor in stored.items() if name not in scales}
        self._plain = HfSource(self._stored, expected)
        for name in sorted(scales):
            _check_owner(stored, name)
        self._scales: dict[str, StoredHf] = {}
        for name, tensor in self._stored.items():
            if _is_float8(tensor.dtype):
                self._scales[name] = _scales_of(stored, name)
                _check_scales(name, tensor, self._scales[name], block)

    @property
    def dequantised(self) -> int:
        """How many tensors are in fp8, each with another one for its scales."""
        return len(self._scales)

    def names(self) -> set[str]:
        """See `Source`."""
        return self._plain.names()

    def dtype(self, name: str) -> torch.dtype:
        """See `Source`."""
        return torch.bfloat16 if name in self._scales else self._plain.dtype(name)

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """See `Source`."""
        if name not in self._scales:
            yield from self._plain.read(name, box)
            return
        view = self._expected[name].view
        axes = _row_axes(self._expected[name])
        [(_, codes)] = self._plain.read(name, box)
        rows = _block_numbers(view[:axes], box[:axes], self._block[0])
        columns = _block_numbers(view[axes:], box[axes:], self._block[1])
        # Rows are in order, so these are all blocks between the first and the last.
        first, last = int(rows[0]), int(rows[-1])
        factors = self._scales[name].view()[first : last + 1].float()[:, columns]
        rows = (rows - first).view(codes.shape[0], -1)
        step = max(_PART_ELEMENTS // codes[0].numel(), 1)
        for start in range(0, codes.shape[0], step):
            part = codes[start : start + step]
            factor = factors.index_select(0, rows[start : start + step].reshape(-1))
            begin = box[0][0] + start
            yield ((begin, begin + part.shape[0]), *box[1:]), _product(part, factor)

    def fragments(self, name: str, box: Box) -> Iterator[Fragment]:
        """See `Source`."""
        for fragment in self._plain.fragments(name, box):
            if name not in self._scales:
                yield fragment
                continue
            yield Fragment(
                box=box,
                file=fragment.file,
                key=name,
                shape=fragment.shape,
                stored_as=f"{_name(_STORED)} with scales {list(self._scales[name].shape)}",
            )


def _product(codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """fp32 values of fp8 ones; `factors` [rows, columns] in the shape that they have as a matrix."""
    values = _VALUES.index_select(0, codes.reshape(-1).view(torch.uint8).int())
    return values.view(factors.shape).mul_(factors).view(codes.shape)


def _block_numbers(sizes: Sequence[int], part: Box, block: int) -> torch.Tensor:
    """For each index of a part of a dimension, that is seen in `sizes`, the block that it falls in."""
    return take(torch.arange(math.prod(sizes)).view(tuple(sizes)), part).reshape(-1) // block


def _row_axes(tensor: HfTensor) -> int:
    """How many axes of a matrix's view are its rows; the others are its columns."""
    return next(axes for axes in range(1, len(tensor.view)) if math.prod(tensor.view[:axes]) == tensor.shape[0])


# What is refused


def _check_owner(stored: Mapping[str, StoredHf], name: str) -> None:
    owner = name.removesuffix(SCALE)
    if owner not in stored:
        raise UserError(
            f"{stored[name].file}: {name} has no {owner} beside it, which it would be the scales of; copy the files of "
            "the model again"
        )
    if not _is_float8(stored[owner].dtype):
        raise UserError(
            f"{stored[owner].file}: {owner} is {_name(stored[owner].dtype)}, but has scales beside it ({name} in "
            f"{stored[name].file.name}); expected {_name(_STORED)}. If it was dequantised before, remove the scales"
        )


def _scales_of(stored: Mapping[str, StoredHf], name: str) -> StoredHf:
    tensor = stored[name]
    if tensor.dtype != _STORED:
        raise UserError(
            f"{tensor.file}: {name} is {_name(tensor.dtype)}; of fp8 only {_name(_STORED)} with scales by block can be "
            "read, convert from the bf16 weights of the model"
        )
    if (scales := stored.get(name + SCALE)) is not None:
        return scales
    other = next((name + end for end in ("_scale", "_scale_2") if name + end in stored), None)
    if other is not None:
        raise UserError(
            f"{tensor.file}: {name} is {_name(_STORED)} with {other} {list(stored[other].shape)} beside it, scales per "
            f"tensor or per channel, which cannot be read; expected {name}{SCALE}, scales by block. Convert from the "
            "bf16 weights of the model, or dequantise it first with the library that quantised it"
        )
    raise UserError(
        f"{tensor.file}: {name} is {_name(_STORED)}, but {name}{SCALE} is not there; expected scales by block. Copy "
        "the files of the model again, or convert from its bf16 weights"
    )


def _check_scales(name: str, tensor: StoredHf, scales: StoredHf, block: tuple[int, int]) -> None:
    if len(tensor.shape) != 2:
        raise UserError(f"{tensor.file}: {name} is {_name(_STORED)} {list(tensor.shape)}; expected a matrix")
    shape = tuple(-(-size // length) for size, length in zip(tensor.shape, block, strict=True))
    if scales.shape != shape or scales.dtype not in _SCALE_DTYPES:
        raise UserError(
            f"{scales.file}: {name}{SCALE} is {_name(scales.dtype)} {list(scales.shape)}; expected {list(shape)} of "
            f"{_name(_SCALE_DTYPES[0])}, one for each block {list(block)} of {name} {list(tensor.shape)}. Check "
            "quantization_config.weight_block_size in config.json, and that it belongs to these weights"
        )
    values = scales.view().float()
    usable = values.isfinite() & (values >= 0)
    for row, column in (values == 0).nonzero().tolist():
        # Zero is the scale of a block of zeros, of nothing else.
        codes = take(tensor.view(), _ranges(row, column, block, tensor.shape)).view(torch.uint8)
        usable[row, column] = not (codes & 0x7F).any()
    if not usable.all():
        row, column = (~usable).nonzero()[0].tolist()
        raise UserError(
            f"{scales.file}: {name}{SCALE} holds {float(values[row, column])} at [{row}, {column}], for a block that "
            "is not all zeros; expected finite numbers above zero. It is damaged, copy the files of the model again"
        )


def _ranges(row: int, column: int, block: tuple[int, int], shape: Sequence[int]) -> Box:
    return tuple(
        (index * length, min((index + 1) * length, size))
        for index, length, size in zip((row, column), block, shape, strict=True)
    )


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
