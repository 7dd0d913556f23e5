"""The tensors of a checkpoint, read one at a time in a single process: without a process group, whatever the number
of ranks that wrote them.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from mindspeed_llm.checkpoints.dcp_reader import file_of, load_plain, read_metadata, tensor_entries
from mindspeed_llm.checkpoints.files import METADATA, DamagedCheckpoint


class CheckpointTensors:
    """`entries` has the metadata of every tensor by name; `read` gives its values."""

    def __init__(self, folder: Path) -> None:
        """Reads the metadata only.

        Raises:
            DamagedCheckpoint: see `read_metadata`; a piece of a tensor is nowhere, or outside of `folder`.
        """
        self._folder = folder
        metadata = read_metadata(folder)
        self.entries: dict[str, TensorStorageMetadata] = tensor_entries(metadata, folder)
        self._storage = metadata.storage_data or {}
        for place in self._storage.values():
            file_of(place, folder)
        for name, entry in self.entries.items():
            self._check_complete(name, entry)

    def files_of(self, names: Iterable[str]) -> list[str]:
        """The files that hold these tensors."""
        chunks = ((name, chunk) for name in names for chunk in self.entries[name].chunks if all(chunk.sizes))
        return sorted({self._storage[MetadataIndex(name, chunk.offsets)].relative_path for name, chunk in chunks})

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor in host memory, cast to `dtype` piece by piece.

        Raises:
            DamagedCheckpoint: a file that is missing or does not hold what the metadata says.
        """
        entry = self.entries[name]
        if len(entry.chunks) == 1 and entry.size.numel():
            return self._read_chunk(name, entry, entry.chunks[0]).to(dtype)
        whole = torch.empty(entry.size, dtype=dtype)
        for chunk in entry.chunks:
            if all(chunk.sizes):
                index = tuple(
                    slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
                )
                whole[index].copy_(self._read_chunk(name, entry, chunk))
        return whole

    def _read_chunk(self, name: str, entry: TensorStorageMetadata, chunk: ChunkStorageMetadata) -> torch.Tensor:
        info = self._storage[MetadataIndex(name, chunk.offsets)]
        path = self._folder / info.relative_path
        try:
            with path.open("rb") as stream:
                tensor = load_plain(path, _FileSlice(stream, info.offset, info.length))
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{path} is missing, and {name} needs it") from None
        found = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        if found != (expected := (tuple(chunk.sizes), entry.properties.dtype)):
            raise DamagedCheckpoint(f"{path} holds {found} for {name} instead of {expected}")
        return tensor

    def _check_complete(self, name: str, entry: TensorStorageMetadata) -> None:
        path = self._folder / METADATA
        for chunk in entry.chunks:
            info = self._storage.get(MetadataIndex(name, chunk.offsets))
            if info is None and all(chunk.sizes):
                raise DamagedCheckpoint(f"{path} does not say where {name} from {list(chunk.offsets)} lies")
            if info is not None and getattr(info, "transform_descriptors", None):
                raise DamagedCheckpoint(f"{path}: {name} is stored as {info.transform_descriptors}, expected as it is")
        # The ranks cut tensors into boxes that do not overlap: they fill the whole when their sizes add up.
        stored = sum(torch.Size(chunk.sizes).numel() for chunk in entry.chunks)
        if stored != torch.Size(entry.size).numel():
            raise DamagedCheckpoint(
                f"{path}: the pieces of {name} have {stored} numbers instead of {torch.Size(entry.size).numel()}"
            )


class _FileSlice(io.RawIOBase):
    """A part of an open file as a file of its own, so that a piece is read without a copy of its bytes."""

    def __init__(self, stream: io.BufferedIOBase | io.BufferedReader, offset: int, length: int) -> None:
        self._stream, self._offset, self._length = stream, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = start + position
        return self._position

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        left = max(self._length - self._position, 0)
        self._stream.seek(self._offset + self._position)
        count = self._stream.readinto(memoryview(buffer).cast("B")[:left])
        self._position += count
        return count
