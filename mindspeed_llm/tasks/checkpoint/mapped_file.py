"""A file mapped into memory, and the tensors in it as views: reading one costs the pages that are touched, no copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch


class MappedFile:
    """The bytes of a file. The mapping is private: the file cannot be changed through it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        # An empty file cannot be mapped.
        self._bytes = (
            torch.from_file(str(path), shared=False, size=self.size, dtype=torch.uint8)
            if self.size
            else torch.empty(0, dtype=torch.uint8)
        )

    def head(self, start: int, count: int) -> bytes:
        """A few bytes as they are."""
        return self._bytes[start : start + count].numpy().tobytes()

    def tensor(
        self, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The tensor that starts at byte `offset`; a copy only where the file does not align it."""
        if stride is None:
            count = math.prod(shape)
        elif not math.prod(shape):
            count = 0
        else:
            count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        part = self._bytes[offset : offset + count * dtype.itemsize]
        if offset % dtype.itemsize:
            part = part.clone()
        values = part.view(dtype)
        return values.view(tuple(shape)) if stride is None else values.as_strided(tuple(shape), tuple(stride))
