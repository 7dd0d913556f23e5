"""Files of `torch.save` that are on the disk, and as they were meant, when they have been written."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash

from mindspeed_llm.checkpoints.files import DamagedCheckpoint, describe_file


class _HashingStream(io.RawIOBase):
    """Hands bytes on and hashes them on the way, so that what lies on the disk can be compared with what was meant."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._digest, self.size = stream, xxhash.xxh3_128(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self.size += len(data)
        self._stream.write(data)
        return len(data)

    def description(self) -> dict[str, Any]:
        """Size and hash of what went through."""
        return {"size": self.size, "xxh3": self._digest.hexdigest()}


def disk_error(error: RuntimeError) -> Exception:
    """What the disk said, where torch has gone on to the end of its file and has an error of its own then."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


def save_file(content: Any, path: Path) -> dict[str, Any]:
    """Write a file with `torch.save`, push it to the disk and read it back; returns its size and hash.

    Raises:
        OSError: it cannot be written.
        DamagedCheckpoint: the disk gives back something else.
    """
    with path.open("wb") as stream:
        hashing = _HashingStream(stream)
        try:
            torch.save(content, cast("IO[bytes]", hashing))
        except RuntimeError as error:
            raise disk_error(error) from None
        stream.flush()
        os.fsync(stream.fileno())
    meant = hashing.description()
    if describe_file(path) != meant:
        raise DamagedCheckpoint(f"{path} does not hold what was written; the disk may be broken")
    return meant
