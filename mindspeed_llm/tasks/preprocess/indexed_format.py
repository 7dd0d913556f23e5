"""Megatron's indexed format: sequences of token ids in `<prefix>.bin`, their lengths and places in `<prefix>.idx`.

Layout of the index file, little endian: magic (9 bytes), version 1 (u64), type code (u8), number of sequences N (u64),
number of document boundaries D (u64), lengths (N x i32), byte offsets (N x i64), boundaries (D x i64, the first is 0).
Files are byte-compatible with megatron-core's IndexedDataset, which this module does not need.
"""

import os
import struct
import uuid
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mindspeed_llm.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPE_CODES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16,
}  # fmt: skip
_CODE_OF = {np.dtype(kind): code for code, kind in _TYPE_CODES.items()}


def bin_file(prefix: str | Path) -> Path:
    """The data file of a prefix."""
    return Path(f"{prefix}.bin")


def idx_file(prefix: str | Path) -> Path:
    """The index file of a prefix."""
    return Path(f"{prefix}.idx")


def indexed_exists(prefix: str | Path) -> bool:
    """Whether both files of the prefix exist."""
    return bin_file(prefix).is_file() and idx_file(prefix).is_file()


def temporary_name(file: Path) -> Path:
    """A name beside `file` to write to before a rename; no other process, of any machine, has the same."""
    return file.with_name(f".{file.name}.{uuid.uuid4().hex}")


class IndexedWriter:
    """Write sequences under temporary names; `finalize` publishes both files by rename, the index last.

    Used as a context manager it finalizes on success and removes the temporary files on an exception.
    """

    def __init__(self, prefix: str | Path, dtype: Any = np.int32) -> None:
        self._prefix, self._dtype = Path(prefix), np.dtype(dtype)
        self._prefix.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = temporary_name(bin_file(prefix))
        self._data = self._temporary.open("wb", buffering=1 << 20)
        self._lengths: list[np.ndarray] = []
        self._documents: list[np.ndarray] = [np.zeros(1, dtype=np.int64)]
        self._num_sequences = 0

    def add(self, ids: np.ndarray) -> None:
        """Append one sequence that is a document of its own."""
        self.add_many(ids, np.array([len(ids)]))

    def add_many(self, ids: np.ndarray, lengths: Iterable[int] | np.ndarray) -> None:
        """Append sequences laid end to end in `ids`, each a document of its own."""
        lengths = np.asarray(lengths, dtype=np.int32)
        if int(lengths.sum(dtype=np.int64)) != len(ids):
            raise ValueError(f"lengths sum to {int(lengths.sum())}, but there are {len(ids)} ids")
        self._data.write(np.ascontiguousarray(ids, dtype=self._dtype).tobytes())
        self._lengths.append(lengths)
        self._documents.append(self._num_sequences + np.arange(1, len(lengths) + 1, dtype=np.int64))
        self._num_sequences += len(lengths)

    def finalize(self) -> None:
        """Write the index and publish both files."""
        self._data.flush()
        os.fsync(self._data.fileno())
        self._data.close()
        lengths = np.concatenate([np.zeros(0, dtype=np.int32), *self._lengths])
        offsets = np.zeros(len(lengths), dtype=np.int64)
        if len(lengths):
            np.cumsum(lengths[:-1], out=offsets[1:], dtype=np.int64)
            offsets *= self._dtype.itemsize
        documents = np.concatenate(self._documents)
        temporary = temporary_name(idx_file(self._prefix))
        with temporary.open("wb") as stream:
            stream.write(_HEADER.pack(_MAGIC, _VERSION, _CODE_OF[self._dtype], len(lengths), len(documents)))
            for array in (lengths, offsets, documents):
                stream.write(array.tobytes())
            stream.flush()
            os.fsync(stream.fileno())
        self._temporary.replace(bin_file(self._prefix))
        temporary.replace(idx_file(self._prefix))

    def abort(self) -> None:
        """Remove the temporary data file."""
        self._data.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abort()


class IndexedReader:
    """Read an indexed file through memory maps; all processes of a machine share the pages.

    `lengths` (int32) holds the number of tokens of each sequence, `documents` (int64) the document boundaries. Raises
    UserError when a file is missing, damaged, or the two do not belong together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        self._open()

    def _open(self) -> None:
        index, data = idx_file(self.prefix), bin_file(self.prefix)
        for file in (index, data):
            if not file.is_file():
                raise UserError(f"indexed data set {self.prefix}: {file} does not exist")
        if index.stat().st_size < _HEADER.size:
            raise UserError(f"{index} is damaged: {index.stat().st_size} bytes are shorter than its header")
        buffer = np.memmap(index, mode="r", dtype=np.uint8)
        magic, version, code, num_sequences, num_documents = _HEADER.unpack(buffer[: _HEADER.size].tobytes())
        if magic != _MAGIC or version != _VERSION or code not in _TYPE_CODES:
            raise UserError(f"{index} is not an index file of Megatron's format (version {_VERSION})")
        expected = _HEADER.size + 12 * num_sequences + 8 * num_documents
        if len(buffer) < expected:
            raise UserError(f"{index} is damaged: {len(buffer)} bytes, expected {expected}")
        self.dtype = np.dtype(_TYPE_CODES[code])
        start = _HEADER.size
        self.lengths = np.frombuffer(buffer, np.int32, num_sequences, start)
        start += 4 * num_sequences
        self._offsets = np.frombuffer(buffer, np.int64, num_sequences, start)
        self.documents = np.frombuffer(buffer, np.int64, num_documents, start + 8 * num_sequences)
        size = data.stat().st_size
        needed = int(self._offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if num_sequences else 0
        if size < needed:
            raise UserError(f"{data} is damaged: {size} bytes, but the index speaks of {needed}")
        # An empty file cannot be mapped.
        self._data = np.memmap(data, mode="r", dtype=np.uint8) if size else np.zeros(0, dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` tokens (default: all that remain) of a sequence from `offset`, as a read-only view."""
        available = int(self.lengths[index]) - offset
        count = available if length is None else length
        if not 0 <= count <= available:
            raise IndexError(f"sequence {index} of {self.prefix}: {count} tokens from {offset}, {available} available")
        return np.frombuffer(self._data, self.dtype, count, int(self._offsets[index]) + offset * self.dtype.itemsize)

    def __getstate__(self) -> dict[str, Any]:
        # Sent to loader processes as a path; they map the files themselves.
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.prefix = state["prefix"]
        self._open()
