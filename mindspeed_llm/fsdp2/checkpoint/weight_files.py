"""The tensors of a Hugging Face model directory, read slice by slice.

Opening a directory reads headers only. A `StoredTensor` reads the bytes of the slice it is asked for, and the classes
below it describe tensors that are put together from several stored ones (the experts of a MoE layer, say) and pass a
request for a slice on to the parts, so that a rank reads only what it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.weight_layout import LAYOUTS, weight_files
from mindspeed_llm.tasks.checkpoint.safetensors_file import DTYPES
from mindspeed_llm.tasks.checkpoint.weight_index import read_index

_PICKLE_SUFFIXES = (".bin", ".pt")


class LazyTensor(Protocol):
    """A tensor whose shape and dtype are known and whose values are read on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        """The values of `tensor[index]`; `index` has one slice with explicit bounds and step 1 per dimension."""
        ...


class _SafetensorsFile:
    """One open safetensors file (memory mapped by the library, so that a slice costs its own bytes only)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.handle = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path}: not a readable safetensors file ({error}); expected a complete file, found "
                f"{path.stat().st_size if path.exists() else 0} bytes. Copy the weights again."
            ) from error


class StoredTensor:
    """A tensor of a safetensors file."""

    def __init__(self, file: _SafetensorsFile, name: str) -> None:
        view = file.handle.get_slice(name)
        self._file, self.name = file, name
        self.shape = tuple(view.get_shape())
        dtype = view.get_dtype()
        if dtype not in DTYPES:
            raise UserError(
                f"{file.path}: tensor {name} has dtype {dtype}, which cannot be read; expected one of {sorted(DTYPES)}"
            )
        self.dtype = DTYPES[dtype]

    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        if not self.shape:
            return self._file.handle.get_tensor(self.name)
        return self._file.handle.get_slice(self.name)[index]


class MappedTensor:
    """A tensor of a torch.save file; the file is memory mapped and loaded without executing anything it holds."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        return self._tensor[index].clone()


class Stacked:
    """`torch.stack(parts, dim)` of parts that have one shape."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        shapes = {part.shape for part in parts}
        if len(shapes) != 1:
            raise UserError(f"tensors that belong to one stack of experts differ in shape: {sorted(shapes)}")
        shape = list(parts[0].shape)
        shape.insert(dim, len(parts))
        self._parts, self._dim = list(parts), dim
        self.shape, self.dtype = tuple(shape), parts[0].dtype

    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        chosen = index[self._dim]
        rest = index[: self._dim] + index[self._dim + 1 :]
        if chosen.start >= chosen.stop:
            return torch.empty([s.stop - s.start for s in index], dtype=self.dtype)
        return torch.stack([part.read(rest) for part in self._parts[chosen]], dim=self._dim)


class Concatenated:
    """`torch.cat(parts, dim)`."""

    def __init__(self, parts: Sequence[LazyTensor], dim: int) -> None:
        shape = list(parts[0].shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        self._parts, self._dim = list(parts), dim
        self.shape, self.dtype = tuple(shape), parts[0].dtype

    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        chosen = index[self._dim]
        pieces, offset = [], 0
        for part in self._parts:
            length = part.shape[self._dim]
            start, stop = max(chosen.start - offset, 0), min(chosen.stop - offset, length)
            offset += length
            if start < stop:
                pieces.append(part.read(index[: self._dim] + (slice(start, stop),) + index[self._dim + 1 :]))
        if not pieces:
            return torch.empty([s.stop - s.start for s in index], dtype=self.dtype)
        return torch.cat(pieces, dim=self._dim)


class Transposed:
    """`part.transpose(dim0, dim1)`."""

    def __init__(self, part: LazyTensor, dim0: int, dim1: int) -> None:
        order = list(range(len(part.shape)))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        self._part, self._order = part, order
        self.shape, self.dtype = tuple(part.shape[d] for d in order), part.dtype

    def read(self, index: tuple[slice, ...]) -> torch.Tensor:
        # A transposition of two dimensions is its own inverse.
        return self._part.read(tuple(index[d] for d in self._order)).permute(self._order)


def full_index(shape: Sequence[int]) -> tuple[slice, ...]:
    """The index that reads a tensor of `shape` whole."""
    return tuple(slice(0, size) for size in shape)


def open_weights(folder: Path) -> dict[str, LazyTensor]:
    """All tensors of a Hugging Face model directory by name; reads headers only.

    Looked for in this order: model.safetensors.index.json, model.safetensors, any *.safetensors,
    pytorch_model.bin.index.json, pytorch_model.bin, any *.bin, any *.pt.

    Raises:
        UserError: no weights, a shard that the index names is missing, a damaged file, one name in two files.
    """
    files = weight_files(folder)
    tensors: dict[str, LazyTensor] = {}
    origin: dict[str, Path] = {}
    for path in files:
        for name, tensor in open_file(path).items():
            if name in tensors:
                raise UserError(f"tensor {name} is in two files: {origin[name]} and {path}; remove the stale one")
            tensors[name], origin[name] = tensor, path
    return tensors


def open_file(path: Path) -> dict[str, LazyTensor]:
    """The tensors of one file by name; reads its header only. Raises UserError where it is damaged."""
    if path.suffix not in _PICKLE_SUFFIXES:
        file = _SafetensorsFile(path)
        return {name: StoredTensor(file, name) for name in file.handle.keys()}  # noqa: SIM118 (not a dict)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds for damaged or unsafe files; all mean the same here
        raise UserError(f"{path}: cannot be loaded as plain tensors ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}; expected tensors by name")
    return {name: MappedTensor(tensor) for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}


def has_weights(folder: Path) -> bool:
    """Whether a model directory has any weight files (an index alone does not count)."""
    return any(True for _, pattern in LAYOUTS for _ in folder.glob(pattern))


def indexed_names(folder: Path) -> list[str]:
    """The tensors that the weight index of a directory names; empty where it has no index.

    Raises:
        UserError: it is damaged.
    """
    for single, _ in LAYOUTS:
        if single and (index := folder / f"{single}.index.json").is_file():
            return list(read_index(index))
    return []
