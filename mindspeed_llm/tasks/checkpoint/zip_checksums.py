"""Where a file of `torch.save`, which is a zip archive, holds the checksums of its entries.

Each entry's bytes are followed by a descriptor with their CRC-32, and the directory at the end repeats it. torch writes
both and reads neither; `unzip -t` and Python's zipfile do.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.mapped_file import MappedFile
from mindspeed_llm.tasks.checkpoint.torch_file import entry_start

_DIRECTORY_ENTRY = struct.Struct("<4s24xHHH12x")  # signature; lengths of name, extra field and comment
_CRC_IN_ENTRY = 16
_READ_BYTES = 2**20


def checksum_places(path: Path) -> dict[int, tuple[int, int]]:
    """For each entry with content, by the offset of its first byte: the offsets of its two checksums."""
    file = MappedFile(path)
    places: dict[int, tuple[int, int]] = {}
    with zipfile.ZipFile(path) as archive:
        directory = file.head(archive.start_dir, file.size - archive.start_dir)
        at = 0
        for info in archive.infolist():
            signature, *lengths = _DIRECTORY_ENTRY.unpack_from(directory, at)
            assert signature == b"PK\x01\x02", f"{path}: no entry of the directory at {archive.start_dir + at}"
            start = entry_start(file, info)
            if info.file_size:
                end = start + info.file_size
                assert file.head(end, 4) == b"PK\x07\x08", f"{path}: no descriptor at {end}"
                places[start] = (end + 4, archive.start_dir + at + _CRC_IN_ENTRY)
            at += _DIRECTORY_ENTRY.size + sum(lengths)
    return places


def check(path: Path, on_bytes: Callable[[int], None] | None = None) -> None:
    """Read a whole file of `torch.save` and compare its checksums.

    Raises:
        UserError: an entry is damaged; names it.
    """
    file = MappedFile(path)
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            start, crc = entry_start(file, info), 0
            for at in range(start, start + info.file_size, _READ_BYTES):
                content = file.head(at, min(_READ_BYTES, start + info.file_size - at))
                crc = zlib.crc32(content, crc)
                if on_bytes is not None:
                    on_bytes(len(content))
            # torch writes no checksum where it was told to leave it out, and of an entry without content.
            if info.CRC and crc != info.CRC:
                raise UserError(
                    f"{path}: its entry {info.filename} is damaged (CRC-32 {crc:08x}, should be {info.CRC:08x})"
                )
