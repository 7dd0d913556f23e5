"""The samples of a data set on disk, whatever its kind."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from mindspeed_llm.tasks.preprocess.inspection.locating import Location
from mindspeed_llm.tasks.preprocess.inspection.streams import (
    Sample,
    Stream,
    labelled_stream,
    pair_sample,
    prompt_stream,
    text_stream,
)

_PAIR = ("chosen", "rejected")


class DataSet:
    """Samples of one data set. `kind` is pretrain, instruction, pairwise or prompt, by the summary or by the keys.

    `padding_ids` are ids that packs of other tools may be filled up with.

    Raises UserError where files are missing or damaged, or do not belong together.
    """

    def __init__(self, location: Location, padding_ids: frozenset[int]) -> None:
        self.location = location
        self._padding_ids = _padding_ids(location.summary, padding_ids)
        self.kind = _kind(location)
        self._readers = {key: IndexedReader(path) for key, path in location.files.items()}
        self._check()
        self._count = _number_of_documents(self._main) if self.kind == "pretrain" else len(self._main)

    def __len__(self) -> int:
        return self._count

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sequence of the first key."""
        return self._main.lengths

    @property
    def _main(self) -> IndexedReader:
        names = {"pretrain": next(iter(self._readers)), "pairwise": "chosen_input_ids"}
        return self._readers[names.get(self.kind, "input_ids")]

    def __getitem__(self, index: int) -> Sample:
        if self.kind == "pretrain":
            several = len(self._readers) > 1
            return Sample(index, tuple(self._document(key, index, key if several else "") for key in self._readers))
        if self.kind == "pairwise":
            return pair_sample(index, *(self._labelled(index, f"{side}_", side) for side in _PAIR))
        if self.kind == "prompt":
            others = [key for key in self._readers if key not in ("input_ids", "attention_mask")]
            return Sample(
                index,
                (
                    prompt_stream("prompt" if others else "", self._read("input_ids", index)),
                    *(prompt_stream(key, self._read(key, index)) for key in others),
                ),
            )
        return Sample(index, (self._labelled(index, "", ""),))

    def _labelled(self, index: int, side: str, title: str) -> Stream:
        ids, labels = self._read(f"{side}input_ids", index), self._read(f"{side}labels", index)
        if len(ids) != len(labels):
            raise UserError(
                f"{self.location.prefix}: sample {index} has {len(ids)} ids, but {len(labels)} labels: its files do "
                "not belong together, or are damaged; preprocess the data again"
            )
        mask = self._read("attention_mask", index) if not side and "attention_mask" in self._readers else None
        if mask is not None and len(mask) != len(ids):
            raise UserError(f"{self.location.prefix}: sample {index} has {len(ids)} ids, but a mask of {len(mask)}")
        padding_ids = frozenset[int]() if side else self._padding_ids
        return labelled_stream(title, ids, labels, mask, padding_ids=padding_ids)

    def _document(self, key: str, index: int, title: str) -> Stream:
        bounds = self._readers[key].documents
        places = range(int(bounds[index]), int(bounds[index + 1])) if len(bounds) > 1 else range(index, index + 1)
        return text_stream(title, [self._read(key, place) for place in places])

    def _read(self, key: str, index: int) -> np.ndarray:
        try:
            return self._readers[key][index]
        except (ValueError, IndexError) as error:
            raise UserError(f"{self.location.files[key]}.idx is damaged at sequence {index}: {error}") from error

    def _check(self) -> None:
        needed = {
            "pretrain": (),
            "instruction": ("input_ids", "labels"),
            "pairwise": tuple(f"{side}_{key}" for side in _PAIR for key in ("input_ids", "labels")),
            "prompt": ("input_ids",),
        }[self.kind]
        missing = [key for key in needed if key not in self._readers]
        if missing:
            raise UserError(
                f"{self.location.describe()}: the files of {', '.join(missing)} are missing; preprocess the data again"
            )
        sizes = {
            key: _number_of_documents(reader) if self.kind == "pretrain" else len(reader)
            for key, reader in self._readers.items()
        }
        if len(set(sizes.values())) > 1:
            counts = ", ".join(f"{key} {size}" for key, size in sizes.items())
            raise UserError(
                f"{self.location.prefix}: the files do not belong together, their numbers of samples differ: {counts}; "
                "preprocess the data again"
            )


def _padding_ids(summary: Mapping[str, Any] | None, usual: frozenset[int]) -> frozenset[int] | None:
    """Ids of which a row at the end is padding; None stands for any id."""
    if summary is None:
        return usual
    return None if summary.get("pack") and not summary.get("neat_pack") else frozenset()


def _kind(location: Location) -> str:
    if location.is_text:
        return "pretrain"
    summary: Mapping[str, Any] = location.summary or {}
    if summary.get("kind") in ("instruction", "pairwise", "prompt"):
        return summary["kind"]
    if any(key.startswith(_PAIR) for key in location.files):
        return "pairwise"
    if "labels" in location.files or "input_ids" not in location.files:
        return "instruction"
    return "prompt"


def _number_of_documents(reader: IndexedReader) -> int:
    """Documents; sequences, where a tool has recorded no documents."""
    return len(reader.documents) - 1 if len(reader.documents) > 1 else len(reader)
