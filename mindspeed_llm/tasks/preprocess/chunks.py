"""What work on records gives: token arrays of a batch of records, and the count of what became of the records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mindspeed_llm.tasks.preprocess.readers import Record

_FIRST_LINES_KEPT = 3


@dataclass
class Chunk:
    """Token arrays of some records.

    `arrays[key]` holds all sequences of a key end to end (int32), `lengths[key]` the length of each (int32);
    `document_sizes[key]` the number of sequences of each document, for keys where it is not always one. `skipped` holds
    (reason, file:line): few reasons, whatever the records hold, with what only one record says behind its place;
    `num_targets` counts tokens that carry loss; `empty_replies` counts records with a reply without text, which teaches
    to say nothing, `equal_pairs` preference pairs whose two sides are the same tokens, which teach nothing.
    """

    arrays: dict[str, np.ndarray]
    lengths: dict[str, np.ndarray]
    num_records: int
    skipped: list[tuple[str, str]] = field(default_factory=list)
    empty_replies: int = 0
    num_targets: int = 0
    document_sizes: dict[str, np.ndarray] = field(default_factory=dict)
    equal_pairs: int = 0

    @property
    def first_lengths(self) -> np.ndarray:
        """Lengths of the first key: of every key, where the keys describe the same samples."""
        return next(iter(self.lengths.values()))


class Work(Protocol):
    """Turns records into a chunk; `keys` names the arrays it makes.

    Work that spends its time in a tokenizer that leaves other threads running, and may be called from several threads
    at once, has an attribute `runs_in_threads` that is true.
    """

    keys: tuple[str, ...]

    def __call__(self, records: Sequence[Record]) -> Chunk: ...


@dataclass
class Summary:
    """What became of the records: how many were read, written and skipped, by reason with the first places.

    `num_tokens` and `length_histogram` (length of a sequence, in powers of two -> number of sequences) are over the
    keys that hold token ids; `num_samples` over the first key.
    """

    num_records: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    empty_replies: int = 0
    equal_pairs: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    first_skipped: dict[str, list[str]] = field(default_factory=dict)
    length_histogram: dict[str, int] = field(default_factory=dict)

    def add(self, chunk: Chunk) -> None:
        """Count a chunk in."""
        self.num_records += chunk.num_records
        self.num_samples += len(chunk.first_lengths)
        self.num_targets += chunk.num_targets
        self.empty_replies += chunk.empty_replies
        self.equal_pairs += chunk.equal_pairs
        for key in token_keys(tuple(chunk.lengths)):
            lengths = chunk.lengths[key]
            self.num_tokens += int(lengths.sum(dtype=np.int64))
            self._count_lengths(histogram(lengths))
        for reason, where in chunk.skipped:
            self._count_skipped(reason, 1, [where])

    def add_summary(self, other: "Summary") -> None:
        """Count in what `other` says of the records that follow."""
        for name in ("num_records", "num_samples", "num_tokens", "num_targets", "empty_replies", "equal_pairs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._count_lengths(other.length_histogram)
        for reason, count in other.skipped.items():
            self._count_skipped(reason, count, other.first_skipped[reason])

    def _count_skipped(self, reason: str, count: int, places: Sequence[str]) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + count
        known = self.first_skipped.setdefault(reason, [])
        known += places[: _FIRST_LINES_KEPT - len(known)]

    def _count_lengths(self, counts: Mapping[str, int]) -> None:
        merged = {name: self.length_histogram.get(name, 0) + counts.get(name, 0) for name in _BUCKETS}
        self.length_histogram = {name: count for name, count in merged.items() if count}

    def skip_lines(self) -> list[str]:
        """One line per reason, with the first places."""
        return [
            f"{count} records skipped: {reason} (first at {', '.join(self.first_skipped[reason])})"
            for reason, count in self.skipped.items()
        ]

    def notes(self) -> list[str]:
        """What is worth a look among the records that were not skipped."""
        counts = (
            (self.empty_replies, "records have an empty reply"),
            (self.equal_pairs, "pairs have the same chosen and rejected reply"),
        )
        return [f"{count} {what}" for count, what in counts if count]


_BUCKETS = ("0", "1", "2", *(f"{(1 << power) + 1}-{2 << power}" for power in range(1, 31)))


def histogram(lengths: np.ndarray) -> dict[str, int]:
    """Number of lengths in each of the ranges 0, 1, 2, 3-4, 5-8, 9-16, ...; ranges without any are left out."""
    # A length n of 1 or more belongs to the range whose upper end is the next power of two: ceil(log2 n) of it.
    ranges = np.where(lengths > 0, np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64) + 1, 0)
    counts = np.bincount(ranges, minlength=len(_BUCKETS))
    return {name: int(count) for name, count in zip(_BUCKETS, counts, strict=True) if count}


def token_keys(keys: Sequence[str]) -> list[str]:
    """The keys that hold token ids of their own: all but labels and masks, which belong to the ids of another key."""
    return [key for key in keys if not key.endswith(("labels", "attention_mask"))] or list(keys)


def end_to_end(items: Sequence[Any]) -> np.ndarray:
    """Join sequences of ids to one int32 array."""
    if not items:
        return np.zeros(0, dtype=np.int32)
    return np.concatenate([np.asarray(item, dtype=np.int32) for item in items])
