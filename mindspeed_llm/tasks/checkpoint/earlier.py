"""What an earlier conversion left in a folder, and whether it is still as it was left: only that may be replaced."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.tasks.checkpoint.report import REPORT, read_report

_READ_BYTES = 2**20
Stamp = tuple[int, int, int]
"""Size, time of change in ns and inode: another one shows that a file was changed since it was read."""


@dataclass(frozen=True, kw_only=True)
class EarlierFile:
    """A file as the report of its conversion describes it."""

    nbytes: int
    crc32: str | None
    """Hexadecimal digits; None where the report has none."""
    sha256: str | None = None
    """Likewise; there where all was verified."""

    def is_at(self, path: Path) -> bool:
        """Whether the file at `path` is this one, byte for byte; reads it once."""
        if path.stat().st_size != self.nbytes or self.crc32 is None:
            return False
        crc, digest = 0, hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while content := file.read(_READ_BYTES):
                crc = zlib.crc32(content, crc)
                if self.sha256 is not None:
                    digest.update(content)
        return f"{crc:08x}" == self.crc32 and self.sha256 in (None, digest.hexdigest())


def earlier_files(folder: Path) -> dict[str, EarlierFile]:
    """The files that the conversion into `folder` wrote, by their path in it, and the report at the end; empty where
    there is no report of it.

    Raises:
        UserError: the report is none.
    """
    report = read_report(folder)
    if report is None:
        return {}
    files = {
        name: EarlierFile(nbytes=file["bytes"], crc32=file.get("crc32"), sha256=file.get("sha256"))
        for name, file in report["output"]["files"].items()
    }
    # Nothing says how the report itself was left; it has been read as one.
    content = (folder / REPORT).read_bytes()
    return files | {REPORT: EarlierFile(nbytes=len(content), crc32=f"{zlib.crc32(content):08x}")}


def changed(folder: Path, files: Mapping[str, EarlierFile], *, workers: int) -> str | None:
    """The first of `files` that is in `folder` and not as it was left; None where there is none. Reads them all."""

    def differs(name: str) -> bool:
        path = folder / name
        return is_linked(folder, name) or (path.exists() and not (path.is_file() and files[name].is_at(path)))

    with ThreadPoolExecutor(max_workers=workers) as pool:
        found = pool.map(differs, files)
        return next((name for name, differing in zip(files, found, strict=True) if differing), None)


def stamps(folder: Path, files: Mapping[str, EarlierFile]) -> dict[str, Stamp]:
    """Of those of `files` that are in `folder`: what changes with them."""
    found = {}
    for name in files:
        if (folder / name).exists():
            status = (folder / name).stat()
            found[name] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return found


def is_linked(folder: Path, name: str) -> bool:
    """Whether a symlink stands between `folder` and what is at `name`: no conversion makes one, and what it leads to
    is somebody's.
    """
    parts = Path(name).parts
    return any(folder.joinpath(*parts[:count]).is_symlink() for count in range(1, len(parts) + 1))
