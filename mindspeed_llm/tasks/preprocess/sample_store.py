"""Tokenized samples on disk: one indexed file per key, named as the preprocessing command names them, plus a summary.

`<prefix>_packed_input_ids_document` and `<prefix>_packed_labels_document` hold samples with labels,
`<prefix>_text_document` holds documents. `<prefix>_summary.json` is written last: a store without it is unfinished.
"""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Chunk, Summary
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, IndexedWriter, temporary_name


def key_prefix(prefix: str | Path, key: str) -> Path:
    """Prefix of the indexed file that holds `key`."""
    return Path(f"{prefix}_text_document" if key == "text" else f"{prefix}_packed_{key}_document")


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
                writer.add_many(chunk.arrays[key], chunk.lengths[key])
        if summary.num_samples == 0:
            reasons = "; ".join(summary.skip_lines()) or "there are no records"
            raise UserError(f"no sample to {purpose} on is left of {summary.num_records} records: {reasons}")
    file = summary_file(prefix)
    temporary = temporary_name(file)
    temporary.write_text(json.dumps(asdict(summary), indent=2, ensure_ascii=False), encoding="utf-8")
    temporary.replace(file)


def read_summary(prefix: str | Path) -> Summary:
    """The summary of a finished store."""
    return Summary(**json.loads(summary_file(prefix).read_text(encoding="utf-8")))


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
