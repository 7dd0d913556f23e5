"""What work on records gives: token arrays of a batch of records, and the count of what became of the records."""

from collections.abc import Sequence
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
    (reason, file:line); `num_targets` counts tokens that carry loss; `empty_replies` counts records with a reply
    without text, which teaches to say nothing.
    """

    arrays: dict[str, np.ndarray]
    lengths: dict[str, np.ndarray]
    num_records: int
    skipped: list[tuple[str, str]] = field(default_factory=list)
    empty_replies: int = 0
    num_targets: int = 0
    document_sizes: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def first_lengths(self) -> np.ndarray:
        """Lengths of the first key: of every key, where the keys describe the same samples."""
        return next(iter(self.lengths.values()))


class Work(Protocol):
    """Turns records into a chunk; `keys` names the arrays it makes."""

    keys: tuple[str, ...]

    def __call__(self, records: Sequence[Record]) -> Chunk: ...


@dataclass
class Summary:
    """What became of the records: how many were read, written and skipped, by reason with the first places."""

    num_records: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_targets: int = 0
    empty_replies: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    first_skipped: dict[str, list[str]] = field(default_factory=dict)

    def add(self, chunk: Chunk) -> None:
        """Count a chunk in."""
        self.num_records += chunk.num_records
        self.num_samples += len(chunk.first_lengths)
        self.num_tokens += int(chunk.first_lengths.sum())
        self.num_targets += chunk.num_targets
        self.empty_replies += chunk.empty_replies
        for reason, where in chunk.skipped:
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
            places = self.first_skipped.setdefault(reason, [])
            if len(places) < _FIRST_LINES_KEPT:
                places.append(where)

    def skip_lines(self) -> list[str]:
        """One line per reason, with the first places."""
        return [
            f"{count} records skipped: {reason} (first at {', '.join(self.first_skipped[reason])})"
            for reason, count in self.skipped.items()
        ]

    def notes(self) -> list[str]:
        """What is worth a look among the records that were not skipped."""
        return [f"{self.empty_replies} records have an empty reply"] if self.empty_replies else []


def end_to_end(items: Sequence[Any]) -> np.ndarray:
    """Join sequences of ids to one int32 array."""
    if not items:
        return np.zeros(0, dtype=np.int32)
    return np.concatenate([np.asarray(item, dtype=np.int32) for item in items])
