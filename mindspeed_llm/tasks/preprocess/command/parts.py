"""Parts of the output while it is being made: a folder for each, finished when its summary is there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from mindspeed_llm.tasks.preprocess.chunks import Chunk, Summary
from mindspeed_llm.tasks.preprocess.command.workspace import write_json
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, IndexedWriter, indexed_exists

_SUMMARY = "summary.json"


def part_folder(folder: Path, number: int) -> Path:
    """Where part `number` stands, counted from 0."""
    return folder / f"part-{number:05d}"


def finished_parts(folder: Path, keys: Sequence[str]) -> list[Summary]:
    """The summaries of the parts that are finished and have all keys, from the first one on without a gap."""
    summaries: list[Summary] = []
    while (part := part_folder(folder, len(summaries)) / _SUMMARY).is_file():
        if not all(indexed_exists(part.parent / key) for key in keys):
            break
        summaries.append(Summary(**json.loads(part.read_text(encoding="utf-8"))))
    return summaries


def write_part(folder: Path, keys: Sequence[str], chunks: Iterator[Chunk], size: int | None) -> Summary | None:
    """Write chunks to `folder` until at least `size` records are in (None: all that are left).

    Returns what became of the records, or None, without a folder, where there were none left.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    summary = Summary()
    with ExitStack() as stack:
        writers = {key: stack.enter_context(IndexedWriter(folder / key)) for key in keys}
        for chunk in chunks:
            for key, writer in writers.items():
                writer.add_many(chunk.arrays[key], chunk.lengths[key], chunk.document_sizes.get(key))
            summary.add(chunk)
            if size is not None and summary.num_records >= size:
                break
    if not summary.num_records:
        shutil.rmtree(folder)
        return None
    write_json(folder / _SUMMARY, asdict(summary))
    return summary


def join(prefixes: Sequence[Path], target: Path) -> None:
    """Put indexed files one after the other. A single one is renamed, and is not at its old place any more."""
    if len(prefixes) == 1:
        for suffix in (".bin", ".idx"):
            Path(f"{prefixes[0]}{suffix}").replace(f"{target}{suffix}")
        return
    with IndexedWriter(target) as writer:
        for prefix in prefixes:
            writer.add_file(IndexedReader(prefix))
