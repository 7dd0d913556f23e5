"""Experts in MXFP4 (as gpt-oss is published), given out as bfloat16 while they are read.

A tensor [experts, in, out] is stored transposed as two: `_blocks` [experts, out, in / 32, 16] has two 4-bit floats per
byte, the first in the low half; `_scales` [experts, out, in / 32] has for each 32 of them the power of two that they
are multiplied by, plus 127. (OCP Microscaling Formats, MX v1.0: E2M1 elements, E8M0 scales.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.boxes import Box
from mindspeed_llm.tasks.checkpoint.hf_reader import StoredHf
from mindspeed_llm.tasks.checkpoint.model import HfTensor
from mindspeed_llm.tasks.checkpoint.sources import Fragment, HfSource

_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK, _BIAS = 32, 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])


def is_mxfp4(stored: Mapping[str, StoredHf], expected: Mapping[str, HfTensor]) -> bool:
    """Whether some tensors that a model has are stored in MXFP4."""
    return any(name + _BLOCKS in stored for name in expected)


class Mxfp4Source:
    """A Hugging Face directory in which some tensors are in MXFP4; they are given out as bfloat16.

    Raises:
        UserError: blocks without scales, or of another shape than config.json says.
    """

    def __init__(self, stored: Mapping[str, StoredHf], expected: Mapping[str, HfTensor]) -> None:
        self._expected = expected
        self._packed = {
            name: (stored[name + _BLOCKS], _scales(stored, name)) for name in expected if name + _BLOCKS in stored
        }
        parts = {name + end for name in self._packed for end in (_BLOCKS, _SCALES)}
        self._plain = HfSource({name: tensor for name, tensor in stored.items() if name not in parts}, expected)
        for name, (blocks, scales) in self._packed.items():
            experts, inputs, outputs = expected[name].shape
            count = (experts, outputs, inputs // _BLOCK)
            if inputs % _BLOCK or scales.shape != count or math.prod(blocks.shape) != 16 * math.prod(count):
                raise UserError(
                    f"{blocks.file}: {name} has blocks {list(blocks.shape)} and scales {list(scales.shape)}, but "
                    f"config.json says {[*count, 16]} and {list(count)}; check that they belong together"
                )

    @property
    def dequantised(self) -> int:
        """How many tensors are in MXFP4."""
        return len(self._packed)

    def names(self) -> set[str]:
        """See `Source`."""
        return self._plain.names() | set(self._packed)

    def dtype(self, name: str) -> torch.dtype:
        """See `Source`."""
        return torch.bfloat16 if name in self._packed else self._plain.dtype(name)

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """See `Source`."""
        if name not in self._packed:
            yield from self._plain.read(name, box)
            return
        experts, (first, last), *outer = box
        # The view may cut outputs in two (gate and up in turn): all rows between the first and the last are read.
        sizes = self._expected[name].view[2:]
        inner = math.prod(sizes[1:])
        rows = (outer[0][0] * inner, outer[0][1] * inner)
        columns = (first // _BLOCK, -(-last // _BLOCK))
        values = self._values(name, experts, rows, columns)[
            ..., first - columns[0] * _BLOCK : last - columns[0] * _BLOCK
        ]
        values = values.unflatten(1, (outer[0][1] - outer[0][0], *sizes[1:])).movedim(-1, 1)
        for axis, (start, stop) in enumerate(outer[1:], 3):
            values = values.narrow(axis, start, stop - start)
        yield box, values

    def fragments(self, name: str, box: Box) -> Iterator[Fragment]:
        """See `Source`."""
        if name in self._packed:
            blocks, _ = self._packed[name]
            yield Fragment(box=box, file=blocks.file.name, key=name + _BLOCKS, shape=blocks.shape)
        else:
            yield from self._plain.fragments(name, box)

    def _values(
        self, name: str, experts: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> torch.Tensor:
        """Rows of some experts; columns are counted in blocks."""
        stored_blocks, stored_scales = self._packed[name]
        scales = stored_scales.view()
        part = (slice(*experts), slice(*rows), slice(*columns))
        packed = stored_blocks.view().view(*scales.shape, _BLOCK // 2)[part]
        codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).int()
        values = torch.ldexp(_VALUES[codes], scales[part].int().unsqueeze(-1) - _BIAS)
        return values.flatten(-2).to(torch.bfloat16)


def _scales(stored: Mapping[str, StoredHf], name: str) -> StoredHf:
    if name + _SCALES not in stored:
        raise UserError(
            f"{stored[name + _BLOCKS].file}: {name + _BLOCKS} has no {name + _SCALES} beside it; copy the files of the "
            "model again"
        )
    return stored[name + _SCALES]
