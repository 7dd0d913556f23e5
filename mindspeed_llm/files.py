"""What many rooms do with files: read and write small ones, push them to the disk, and tell them from others by their
content.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError

_READ_BYTES = 8 << 20
_END_BYTES = 1 << 16
TEMPORARY_SUFFIX = ".tmp"


def read_json_object(file: Path) -> dict[str, Any]:
    """The content of a small JSON file. Raises UserError where it cannot be read, or is no object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); expected a JSON object") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a {type(content).__name__}; expected a JSON object")
    return content


def hash_file(path: Path) -> str:
    """xxh3-128 of a file's bytes as hex. It finds damage and change; it is no protection against forgery."""
    import xxhash  # here: rooms that only write files do without the package

    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        while content := stream.read(_READ_BYTES):
            digest.update(content)
    return digest.hexdigest()


def hash_ends(path: Path) -> str:
    """xxh3-128 of a file's first and last 64 KiB, as hex: a look that costs the same for files of any size."""
    import xxhash

    with path.open("rb") as stream:
        first = stream.read(_END_BYTES)
        stream.seek(max(0, path.stat().st_size - _END_BYTES))
        return xxhash.xxh3_128_hexdigest(first + stream.read())


def why_unwritable(folder: Path) -> str | None:
    """Why `folder` can neither be written to nor be made, as far as that can be said without trying; None: it can."""
    # Path.exists raises where a parent may not be looked into.
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not os.path.isdir(existing):
        return f"{existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"no permission for {existing}"
    return None


def why_uncreatable(file: Path) -> str | None:
    """Why `write_durably` could not write `file`, found out by trying it in the nearest folder that exists; None: it
    could. Leaves nothing behind.

    Folders on the way may be missing, as writers make them; but not that which a symbolic link points into.
    """
    try:
        target = behind_links(file)
    except OSError as error:
        return error.strerror
    if target != file and not os.path.isdir(target.parent):
        return f"it is a symbolic link to {target}, and there is no folder {target.parent}"
    file = target
    if reason := why_unwritable(file.absolute().parent):
        return reason
    folder = next(path for path in file.absolute().parents if os.path.isdir(path))
    trial = folder / _temporary_name(file)
    try:
        trial.touch()
        trial.unlink()
    except OSError as error:
        # Not all folders that grant it can be written to: /proc, a file system that is read-only or full.
        return f"no file can be made in {folder} ({error.strerror})"
    return None


def behind_links(file: Path) -> Path:
    """The file that is to be replaced for `file` to have other content: `file` itself, or where a symbolic link of its
    name points, whether there is one yet or not. Renaming to the link would leave its target as it was.

    Raises:
        OSError: links point at each other.
    """
    if not os.path.islink(file):
        return file
    target = Path(os.path.realpath(file))
    if os.path.islink(target):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(file))
    return target


def sync_folder(folder: Path) -> None:
    """Push a directory's entries to the disk: a rename is durable only after that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str | Iterable[str], *, through_links: bool = False) -> None:
    """Write a text file so that a crash leaves the old content or the new one: temporary name, fsync, rename.

    Args:
        text: the content, or its parts in order.
        through_links: where `path` is a symbolic link write its target, as for files that users name. Else the link is
            replaced: a run does not change the files of another one that it was put together from.
    """
    if through_links:
        path = behind_links(path)
    temporary = path.with_name(_temporary_name(path))
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.writelines((text,) if isinstance(text, str) else text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _temporary_name(path: Path) -> str:
    return f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}"
