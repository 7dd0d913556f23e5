"""Megatron's indexed format: sequences of token ids in `<prefix>.bin`, their lengths and places in `<prefix>.idx`.

Layout of the index file, little endian: magic (9 bytes), version 1 (u64), type code (u8), number of sequences N (u64),
number of document boundaries D (u64), lengths (N x i32), byte offsets (N x i64), boundaries (D x i64, the first is 0).
Files are byte-compatible with megatron-core's IndexedDataset, which this module does not need.
"""

import contextlib
import os
import shutil
import struct
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from mindspeed_llm.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPE_CODES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16,
}  # fmt: skip
_BLOCK = 1 << 20
_COPIED_BYTES = 16 << 20
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
    """Write sequences under temporary names; a context manager.

    Without an exception both files are published by rename, the index last; with one nothing is left. Lengths go to a
    file of their own until then, so that memory does not grow with the number of sequences.
    """

    def __init__(self, prefix: str | Path, dtype: Any = np.int32) -> None:
        self._prefix, self._dtype = Path(prefix), np.dtype(dtype)
        self._prefix.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = [temporary_name(bin_file(prefix)) for _ in ("ids", "lengths", "document sizes")]
        self._ids, self._lengths, self._sizes = (file.open("w+b", buffering=1 << 20) for file in self._temporary)
        self._num_sequences = self._num_documents = 0

    def add(self, ids: np.ndarray) -> None:
        """Append one sequence that is a document of its own."""
        self.add_many(ids, np.array([len(ids)]))

    def add_many(
        self, ids: np.ndarray, lengths: Sequence[int] | np.ndarray, document_sizes: np.ndarray | None = None
    ) -> None:
        """Append sequences laid end to end in `ids`.

        `document_sizes` is the number of sequences of each document; None makes each a document of its own.
        """
        lengths = np.asarray(lengths, dtype=np.int32)
        if int(lengths.sum(dtype=np.int64)) != len(ids):
            raise ValueError(f"lengths sum to {int(lengths.sum())}, but there are {len(ids)} ids")
        sizes = np.ones(len(lengths), np.int32) if document_sizes is None else np.asarray(document_sizes, np.int32)
        if int(sizes.sum(dtype=np.int64)) != len(lengths):
            raise ValueError(f"documents of {int(sizes.sum())} sequences, but there are {len(lengths)}")
        self._ids.write(np.ascontiguousarray(ids, dtype=self._dtype).data)
        self._add_lengths(lengths, sizes)

    def add_file(self, reader: "IndexedReader") -> None:
        """Append all sequences and documents of another file of the same type of ids."""
        assert reader.dtype == self._dtype
        with bin_file(reader.prefix).open("rb") as source:
            shutil.copyfileobj(source, self._ids, _COPIED_BYTES)
        for start in range(0, len(reader), _BLOCK):
            self._add_lengths(reader.lengths[start : start + _BLOCK], np.zeros(0, np.int32))
        for start in range(0, len(reader.documents) - 1, _BLOCK):
            sizes = np.diff(reader.documents[start : start + _BLOCK + 1]).astype(np.int32)
            self._add_lengths(np.zeros(0, np.int32), sizes)

    def _add_lengths(self, lengths: np.ndarray, sizes: np.ndarray) -> None:
        self._lengths.write(np.ascontiguousarray(lengths).data)
        self._sizes.write(np.ascontiguousarray(sizes).data)
        self._num_sequences += len(lengths)
        self._num_documents += len(sizes)

    def _finalize(self) -> None:
        """Write the index and publish both files."""
        index = temporary_name(idx_file(self._prefix))
        self._temporary.append(index)
        with index.open("wb", buffering=1 << 20) as stream:
            code = _CODE_OF[self._dtype]
            stream.write(_HEADER.pack(_MAGIC, _VERSION, code, self._num_sequences, self._num_documents + 1))
            for lengths in _blocks(self._lengths):
                stream.write(lengths.data)
            offset = 0
            for lengths in _blocks(self._lengths):
                ends = offset + np.cumsum(lengths, dtype=np.int64) * self._dtype.itemsize
                stream.write(np.concatenate([[offset], ends[:-1]]).astype(np.int64).data)
                offset = int(ends[-1])
            boundary = 0
            stream.write(np.zeros(1, np.int64).data)
            for sizes in _blocks(self._sizes):
                boundaries = boundary + np.cumsum(sizes, dtype=np.int64)
                stream.write(boundaries.data)
                boundary = int(boundaries[-1])
            stream.flush()
            os.fsync(stream.fileno())
        self._ids.flush()
        os.fsync(self._ids.fileno())
        self._ids.close()
        self._temporary[0].replace(bin_file(self._prefix))
        index.replace(idx_file(self._prefix))

    def _abort(self) -> None:
        """Remove the temporary files."""
        for stream in (self._ids, self._lengths, self._sizes):
            # What could not be written (a full disk) is still in the buffer, and is not wanted any more.
            with contextlib.suppress(OSError):
                stream.close()
        for file in self._temporary:
            file.unlink(missing_ok=True)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finalize()
        finally:
            self._abort()


def _blocks(stream: IO[bytes]) -> Iterator[np.ndarray]:
    """The int32 numbers that were written to a file, from its beginning, in blocks."""
    stream.seek(0)
    while content := stream.read(4 * _BLOCK):
        yield np.frombuffer(content, np.int32)


class IndexedReader:
    """Read an indexed file through memory maps; all processes of a machine share the pages.

    `lengths` (int32) holds the number of tokens of each sequence, `documents` (int64) the document boundaries, counted
    in sequences. Raises UserError when a file is missing, damaged or of another format, or when the two do not belong
    together; `check` looks at every length and offset as well.
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
        self.dtype = np.dtype(_TYPE_CODES[code])
        if self.dtype.kind not in "iu":
            raise UserError(f"{index} belongs to numbers of type {self.dtype}; expected token ids, which are integers")
        expected = _HEADER.size + 12 * num_sequences + 8 * num_documents
        if len(buffer) == expected + num_sequences > expected:
            raise UserError(f"{index} has a mode for each sequence (multimodal data); expected plain token ids")
        if len(buffer) != expected:
            raise UserError(f"{index} is damaged: {len(buffer)} bytes, expected {expected}")
        start = _HEADER.size
        self.lengths = np.frombuffer(buffer, np.int32, num_sequences, start)
        start += 4 * num_sequences
        self._offsets = np.frombuffer(buffer, np.int64, num_sequences, start)
        self.documents = np.frombuffer(buffer, np.int64, num_documents, start + 8 * num_sequences)
        if num_documents == 0 or self.documents[0] != 0 or self.documents[-1] != num_sequences:
            raise UserError(f"{index} is damaged: its documents do not span its {num_sequences} sequences")
        size = data.stat().st_size
        needed = int(self._offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if num_sequences else 0
        if size != needed:
            raise UserError(
                f"{data} is damaged: {size} bytes, but the index speaks of {needed}; "
                "the two may come from different runs"
            )
        # An empty file cannot be mapped.
        self._data = np.memmap(data, mode="r", dtype=np.uint8) if size else np.zeros(0, dtype=np.uint8)

    def check(self) -> None:
        """Look at all lengths, offsets and boundaries. Raises UserError naming the first that is wrong."""
        end = 0
        for start in range(0, len(self), _BLOCK):
            lengths, offsets = self.lengths[start : start + _BLOCK], self._offsets[start : start + _BLOCK]
            ends = end + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            wrong = (lengths < 0) | (offsets != np.concatenate([[end], ends[:-1]]))
            if wrong.any():
                at = int(wrong.argmax())
                raise UserError(
                    f"{idx_file(self.prefix)} is damaged: sequence {start + at} of {lengths[at]} tokens lies at byte "
                    f"{offsets[at]}, expected {ends[at - 1] if at else end}"
                )
            end = int(ends[-1])
        for start in range(0, len(self.documents) - 1, _BLOCK):
            if (np.diff(self.documents[start : start + _BLOCK + 1]) < 0).any():
                raise UserError(f"{idx_file(self.prefix)} is damaged: its document boundaries do not ascend")

    @property
    def ids(self) -> np.ndarray:
        """The token ids of all sequences, end to end, as a read-only view."""
        return np.frombuffer(self._data, self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` tokens (default: all that remain) of a sequence from `offset`, as a read-only view."""
        available = int(self.lengths[index]) - offset
        count = available if length is None else length
        if not (offset >= 0 and 0 <= count <= available):
            raise IndexError(f"sequence {index} of {self.prefix}: {count} tokens from {offset}, {available} available")
        return np.frombuffer(self._data, self.dtype, count, int(self._offsets[index]) + offset * self.dtype.itemsize)

    def __getstate__(self) -> dict[str, Any]:
        # Sent to loader processes as a path; they map the files themselves.
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.prefix = state["prefix"]
        self._open()
