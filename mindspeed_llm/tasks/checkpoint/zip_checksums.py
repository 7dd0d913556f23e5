"""Where a file of `torch.save`, which is a zip archive, holds the checksums of its entries.

Each entry's bytes are followed by a descriptor with their CRC-32, and the directory at the end repeats it. torch writes
both and reads neither; `unzip -t` and Python's zipfile do.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from mindspeed_llm.tasks.checkpoint.mapped_file import MappedFile
from mindspeed_llm.tasks.checkpoint.torch_file import entry_start

_DIRECTORY_ENTRY = struct.Struct("<4s24xHHH12x")  # signature; lengths of name, extra field and comment
_CRC_IN_ENTRY = 16


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


def entries(path: Path) -> Iterator[tuple[str, int, int, int]]:
    """The entries of which the file says a checksum: name, offset of the first byte, number of bytes, CRC-32."""
    file = MappedFile(path)
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            # torch writes none where it was told to leave it out.
            if info.CRC:
                yield info.filename, entry_start(file, info), info.file_size, info.CRC
