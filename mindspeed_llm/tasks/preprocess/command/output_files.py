"""The files of an output as they were written, and whether they still are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

_READ_BYTES = 8 << 20
_END_BYTES = 1 << 16


def written(file: Path) -> dict[str, Any]:
    """What is noted of a file: size in bytes, time of change, hashes of all of it and of its two ends."""
    status = file.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "hash": _hash(file), "ends": _hash_of_ends(file)}


def is_as_written(file: Path, note: Mapping[str, Any]) -> bool:
    """Whether a file still is what was noted of it.

    The ends are always looked at; all of it is read only where its time of change is another: it was written to, or is
    a copy.
    """
    if not file.is_file():
        return False
    status = file.stat()
    if status.st_size != note["size"] or _hash_of_ends(file) != note["ends"]:
        return False
    return status.st_mtime_ns == note["mtime_ns"] or _hash(file) == note["hash"]


def _hash(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _hash_of_ends(file: Path) -> str:
    with file.open("rb") as stream:
        first = stream.read(_END_BYTES)
        stream.seek(max(0, file.stat().st_size - _END_BYTES))
        return xxhash.xxh3_128_hexdigest(first + stream.read())
