"""Tokenized samples on disk: one indexed file per key, named as the preprocessing command names them, plus a summary.

`<prefix>_packed_input_ids_document` and `<prefix>_packed_labels_document` hold samples with labels,
`<prefix>_text_document` holds documents of the column `text`, `<prefix>_text_sentence` documents split in sentences.
`<prefix>_summary.json` is written last: a store without it is unfinished.
"""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Chunk, Summary
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, IndexedWriter, temporary_name


def key_prefix(prefix: str | Path, key: str, *, is_text: bool | None = None, level: str = "document") -> Path:
    """Prefix of the indexed file that holds `key`.

    `is_text`: whether the key is a column of text, not a part of a sample; None goes by the name `text`. `level` is
    sentence where documents are split in sentences.
    """
    is_text = key == "text" if is_text is None else is_text
    return Path(f"{prefix}_{key}_{level}" if is_text else f"{prefix}_packed_{key}_{level}")


def summary_file(prefix: str | Path) -> Path:
    """The file that marks a finished store."""
    return Path(f"{prefix}_summary.json")


def store_exists(prefix: str | Path) -> bool:
    """Whether a finished store stands under the prefix."""
    return summary_file(prefix).is_file()


def write_store(
    prefix: str | Path, keys: tuple[str, ...], chunks: Iterable[Chunk], summary: Summary, *, purpose: str = "train"
) -> None:
    """Write the chunks; `summary` is read after the last one. Raises UserError when no sample is left to `purpose` on
    (train or evaluate)."""
    with ExitStack() as stack:
        writers = {key: stack.enter_context(IndexedWriter(key_prefix(prefix, key))) for key in keys}
        for chunk in chunks:
            for key, writer in writers.items():
                writer.add_many(chunk.arrays[key], chunk.lengths[key], chunk.document_sizes.get(key))
        if summary.num_samples == 0:
            reasons = "; ".join(summary.skip_lines()) or "there are no records"
            raise UserError(f"no sample to {purpose} on is left of {summary.num_records} records: {reasons}")
    write_summary(prefix, asdict(summary))


def write_summary(prefix: str | Path, content: Mapping[str, Any]) -> None:
    """Publish a summary, by rename."""
    file = summary_file(prefix)
    temporary = temporary_name(file)
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=2, ensure_ascii=False)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def read_summary(prefix: str | Path) -> Summary:
    """The counts in the summary of a finished store."""
    content = json.loads(summary_file(prefix).read_text(encoding="utf-8"))
    return Summary(**{field.name: content[field.name] for field in fields(Summary) if field.name in content})


class SampleStore:
    """Samples (ids, labels) of a store; a store of text documents has labels equal to its ids."""

    def __init__(self, prefix: str | Path) -> None:
        text = key_prefix(prefix, "text")
        if Path(f"{text}.idx").is_file():
            self._ids = self._labels = IndexedReader(text)
        else:
            self._ids = IndexedReader(key_prefix(prefix, "input_ids"))
            self._labels = IndexedReader(key_prefix(prefix, "labels"))
        self.lengths = self._ids.lengths

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._ids[index], self._labels[index]
