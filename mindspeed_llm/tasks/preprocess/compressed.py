"""Open data files for reading, also those that gzip or Zstandard has compressed."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mindspeed_llm.errors import UserError

COMPRESSIONS = (".gz", ".zst")
"""File extensions of compressed data."""
_BUFFER = 1 << 18
# Small, since a piece may become several hundred times as long.
_COMPRESSED_PIECE = 1 << 14


@contextmanager
def open_bytes(file: Path) -> Iterator[BinaryIO]:
    """Open a file to read what is in it, decompressed where its extension says so.

    Raises UserError, also while it is read, when compressed data is damaged or cut off.
    """
    suffix = file.suffix.lower()
    with file.open("rb", buffering=_BUFFER) as stream:
        if suffix == ".gz":
            with gzip.GzipFile(fileobj=stream) as archive:
                yield io.BufferedReader(_Pieces(file, iter(lambda: archive.read(_BUFFER), b"")), _BUFFER)
        elif suffix == ".zst":
            yield io.BufferedReader(_Pieces(file, _zstd_pieces(stream)), _BUFFER)
        else:
            yield stream


class _Damaged(Exception):
    """Zstandard data that cannot be decompressed."""


def _zstd_pieces(stream: BinaryIO) -> Iterator[bytes]:
    """Decompress Zstandard frames that follow each other. Raises EOFError where the last one is not complete."""
    import zstandard

    new_frame = zstandard.ZstdDecompressor().decompressobj
    frame, begun = new_frame(), False
    while data := stream.read(_COMPRESSED_PIECE):
        while data:
            begun = True
            try:
                piece = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise _Damaged(str(error)) from error
            if piece:
                yield piece
            data = b""
            if frame.eof:
                data = frame.unused_data
                frame, begun = new_frame(), False
    if begun:
        raise EOFError


class _Pieces(io.RawIOBase):
    """Reads from pieces of bytes; errors of their decompressor become those of the user, with the name of the file."""

    def __init__(self, file: Path, pieces: Iterator[bytes]) -> None:
        self._file, self._pieces = file, pieces
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._ready:
            self._ready = memoryview(self._next_piece())
        part = self._ready[: len(buffer)]
        self._ready = self._ready[len(part) :]
        buffer[: len(part)] = part
        return len(part)

    def _next_piece(self) -> bytes:
        try:
            return next(self._pieces, b"")
        except EOFError as error:
            raise UserError(f"{self._file} is cut off: its compressed data ends too early; copy it again") from error
        except (OSError, zlib.error, _Damaged) as error:
            raise UserError(f"{self._file} is damaged: its compressed data cannot be read ({error})") from error
