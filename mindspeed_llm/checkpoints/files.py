"""The files of a checkpoint with their sizes and hashes, and small JSON files that notice a change of any byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from mindspeed_llm.files import hash_file, write_durably

FileList = Mapping[str, Mapping[str, Any]]
"""Relative name -> {"size": bytes, "xxh3": hex digest}."""

METADATA = ".metadata"
"""Where torch.distributed.checkpoint says what lies where."""

_CHECKSUM = re.compile(r'"checksum": "([0-9a-f]{32})"\n}\n\Z')


class DamagedCheckpoint(Exception):
    """A checkpoint that must not be loaded; the text names the file and what is wrong with it."""


def describe_file(path: Path) -> dict[str, Any]:
    """Size and hash of a file, as they stand in a list."""
    return {"size": path.stat().st_size, "xxh3": hash_file(path)}


def check_file(folder: Path, files: FileList, name: str, *, with_hash: bool = True) -> None:
    """Compare one file with the list.

    Raises:
        DamagedCheckpoint: it is missing, of another size, or (with `with_hash`) of other content.
    """
    path, expected = folder / name, files[name]
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DamagedCheckpoint(f"{path} is missing ({error.strerror})") from error
    if path.is_dir():
        raise DamagedCheckpoint(f"{path} is a directory, expected a file")
    if size != expected["size"]:
        raise DamagedCheckpoint(f"{path} has {size} bytes instead of {expected['size']}")
    try:
        same = not with_hash or hash_file(path) == expected["xxh3"]
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror})") from error
    if not same:
        raise DamagedCheckpoint(f"{path} has other content than was written (its hash differs)")


def check_files(folder: Path, files: FileList, names: Iterable[str] | None = None, *, with_hash: bool = True) -> None:
    """`check_file` for `names` (all files where None)."""
    for name in sorted(files) if names is None else names:
        check_file(folder, files, name, with_hash=with_hash)


def wrong_entry(files: Mapping[str, Any]) -> str | None:
    """What in a list of files no writer of this program would have put there; None where it is one."""
    for name, entry in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{name} is not a file of this directory"
        if not isinstance(entry, dict) or entry.keys() != {"size", "xxh3"}:
            return f"{name} has no size and hash"
    return None


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write a mapping as JSON and push it to the disk. A `checksum` follows: the xxh3-128 of the text up to there."""
    text = json.dumps(content, indent=1, ensure_ascii=False).removesuffix("\n}") + ",\n "
    write_durably(path, f'{text}"checksum": "{_hash_text(text)}"\n}}\n')


def read_sealed(path: Path) -> dict[str, Any]:
    """What `write_sealed` wrote.

    Raises:
        DamagedCheckpoint: it is missing, or not as it was written.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = _CHECKSUM.search(text)
        if found is None or found[1] != _hash_text(text[: found.start()]):
            raise DamagedCheckpoint(f"{path} has other content than was written (its checksum differs)")
        content = json.loads(text)
        del content["checksum"]
        return content
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except IsADirectoryError:
        raise DamagedCheckpoint(f"{path} is a directory, expected a file") from None
    except (OSError, ValueError, TypeError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> DamagedCheckpoint:
    """The error that says why a file cannot be read."""
    return DamagedCheckpoint(f"{path} cannot be read ({type(error).__name__}: {error})")


def size_text(size: int) -> str:
    """A number of bytes for people."""
    if size >= 2**27:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.2f} MiB" if size >= 2**17 else f"{size / 2**10:.2f} KiB"


def _hash_text(text: str) -> str:
    return xxhash.xxh3_128(text.encode("utf-8")).hexdigest()
