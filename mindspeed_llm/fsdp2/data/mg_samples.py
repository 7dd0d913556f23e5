"""Sample sets of manager `mg`: rows of one fixed length cut from joined documents."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mindspeed_llm.fsdp2.data.sample import Sample
from mindspeed_llm.tasks.preprocess.samples import IGNORE_INDEX


class TokenRows(Protocol):
    """Rows of S + 1 token ids."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...


class Chain:
    """Several row sets one after the other."""

    def __init__(self, parts: Sequence[TokenRows]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][index - (int(self._ends[part - 1]) if part else 0)]


class Blend:
    """Several row sets blended: `which[i]` is the set and `sample[i]` its row at place i."""

    def __init__(self, parts: Sequence[TokenRows], which: np.ndarray, sample: np.ndarray) -> None:
        self._parts, self._which, self._sample = parts, which, sample

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._parts[int(self._which[index])][int(self._sample[index])]


class NextTokenSamples:
    """Rows of S + 1 tokens -> S inputs and S targets.

    With `eod_id` documents do not see each other: each end-of-document token closes a segment and has no target.
    """

    def __init__(self, rows: TokenRows, *, eod_id: int | None = None) -> None:
        self._rows, self._eod_id = rows, eod_id

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        tokens = self._rows[index]
        ids, labels = tokens[:-1], tokens[1:]
        if self._eod_id is None:
            return Sample(ids, labels)
        ends = np.flatnonzero(ids == self._eod_id)
        labels = labels.copy()
        labels[ends] = IGNORE_INDEX
        edges = np.unique(np.concatenate([[0], ends + 1, [len(ids)]]))
        return Sample(ids, labels, np.diff(edges).tolist())
