"""Whether the files of a source are as they were written, by the checksums that they or a report beside them carry."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import crc32, peft_files
from mindspeed_llm.tasks.checkpoint.hf_reader import weight_files
from mindspeed_llm.tasks.checkpoint.mg_reader import RANK_FILE, MgDirectory
from mindspeed_llm.tasks.checkpoint.report import REPORT, read_report
from mindspeed_llm.tasks.checkpoint.zip_checksums import entries


def check_source(folder: Path, model_type: str, *, workers: int) -> int:
    """Read all weight files of which a checksum is known, and give their number.

    The report of the conversion that wrote them has one for each file. Files of `torch.save` have their own.

    Raises:
        UserError: a file is damaged; names it.
    """
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="convert check") as pool:
        running = [pool.submit(check) for check in _checks(folder, model_type)]
        for future in running:
            future.result()
    return len(running)


def _checks(folder: Path, model_type: str) -> Iterator[Callable[[], None]]:
    report = read_report(folder)
    if report is not None:
        for name, file in report["output"]["files"].items():
            if "tensors" in file:
                yield partial(_check_file, folder / name, file["crc32"])
        return
    if model_type == "hf":
        files = peft_files.weight_files(folder) if peft_files.is_peft(folder) else weight_files(folder)
        paths = [path for path in files if path.suffix != ".safetensors"]
    else:
        paths = [path / RANK_FILE for path in MgDirectory(folder).rank_folders]
    for path in paths:
        yield partial(_check_entries, path)


def _check_file(path: Path, expected: str) -> None:
    found = f"{_crc(path, 0, path.stat().st_size):08x}" if path.is_file() else "missing"
    if found != expected:
        raise UserError(
            f"{path}: its CRC-32 is {found}, {REPORT} beside it says {expected}; the file is damaged, copy it again. "
            f"If it was changed on purpose, remove {REPORT}"
        )


def _check_entries(path: Path) -> None:
    for name, start, nbytes, expected in entries(path):
        if (found := _crc(path, start, start + nbytes)) != expected:
            raise UserError(
                f"{path}: the CRC-32 of its entry {name} is {found:08x}, the file says {expected:08x}; it is damaged, "
                "copy it again. If it was saved with torch's checksums turned off, give --verify sample"
            )


def _crc(path: Path, start: int, stop: int) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return crc32.of_range(descriptor, start, stop)
    finally:
        os.close(descriptor)
