"""What tells inputs and options from others: content hashes of files, and a hash of everything that decides the result.

A file whose path, size, inode and times of change are those of an earlier run has the hash that this run found; it is
not read again. The time of its last change of status is among them: unlike that of its content, no program can set it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from mindspeed_llm.errors import UserError

_LOG = logging.getLogger("mindspeed_llm")
_READ_BYTES = 8 << 20
_WORTH_A_LINE = 4 << 30


@dataclass(frozen=True)
class InputFile:
    """A file as it was found: size in bytes, times of change of content and of status, inode, content hash and number
    of lines (None: not read).
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    hash: str | None
    num_lines: int | None

    @classmethod
    def found(cls, file: Path) -> InputFile:
        """The file without a look into it."""
        status = file.stat()
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(os.path.abspath(file), status.st_size, *times, status.st_ino, None, None)

    def is_unchanged(self) -> bool:
        """Whether the file on disk is still the one with this size, and its content has still this time of change."""
        now = InputFile.found(Path(self.path))
        return (now.size, now.mtime_ns, now.inode) == (self.size, self.mtime_ns, self.inode)


_STATUS = ("path", "size", "mtime_ns", "ctime_ns", "inode")


def status_of(item: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells without a look into a file (as the summary notes it) that it has not changed."""
    return tuple(item.get(name) for name in _STATUS)


def identify(files: Iterable[Path], known: Iterable[Mapping[str, Any]] = (), *, read: bool = True) -> list[InputFile]:
    """Each file with its hash; `known` holds files as an earlier run noted them.

    Without `read` the hash of a file that is not known is None.
    """
    memo = {status_of(item): item for item in known}
    found = [InputFile.found(file) for file in files]
    new = [item for item in found if status_of(asdict(item)) not in memo]
    if read and (total := sum(item.size for item in new)) > _WORTH_A_LINE:
        _LOG.info("reading %.1f GB of input once for its content hash (--streaming does without)", total / 1e9)
    result = []
    for item in found:
        earlier = memo.get(status_of(asdict(item)), {})
        digest, num_lines = earlier.get("hash"), earlier.get("num_lines")
        if read and (digest is None or num_lines is None):
            try:
                digest, num_lines = _read(item.path)
            except OSError as error:
                raise UserError(f"data file {item.path} cannot be read ({error.strerror})") from error
        result.append(replace(item, hash=digest, num_lines=num_lines))
    return result


def _read(path: str) -> tuple[str, int]:
    digest, num_lines, block = xxhash.xxh3_128(), 0, b""
    with open(path, "rb", buffering=0) as stream:
        while content := stream.read(_READ_BYTES):
            block = content
            digest.update(block)
            num_lines += block.count(b"\n")
    # The last line may do without an end.
    return digest.hexdigest(), num_lines + (bool(block) and not block.endswith(b"\n"))


def hash_of(content: Any) -> str:
    """Hash of a value that JSON can hold; the order of the keys of objects does not count."""
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def inputs_hash(files: Sequence[InputFile]) -> str:
    """Hash of the contents of the files in their order; where they lie and what they are called does not count.

    Files that were not read count with path, size and time of change.
    """
    return hash_of(
        [[Path(item.path).suffix.lower(), item.hash or [item.path, item.size, item.mtime_ns]] for item in files]
    )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two sets of options, as `name: old -> new`."""
    return [
        f"{name}: {_shown(old.get(name))} -> {_shown(new.get(name))}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
