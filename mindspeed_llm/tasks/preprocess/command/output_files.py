"""The files of an output as they were written, and whether they still are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_llm.files import hash_ends, hash_file


def written(file: Path) -> dict[str, Any]:
    """What is noted of a file: size in bytes, time of change, hashes of all of it and of its two ends."""
    status = file.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "hash": hash_file(file), "ends": hash_ends(file)}


def is_as_written(file: Path, note: Mapping[str, Any]) -> bool:
    """Whether a file still is what was noted of it.

    The ends are always looked at; all of it is read only where its time of change is another: it was written to, or is
    a copy.
    """
    if not file.is_file():
        return False
    status = file.stat()
    if status.st_size != note["size"] or hash_ends(file) != note["ends"]:
        return False
    return status.st_mtime_ns == note["mtime_ns"] or hash_file(file) == note["hash"]
