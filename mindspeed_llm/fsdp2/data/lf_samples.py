"""Sample sets of manager `lf`: records, one sample each, or several packed into one row."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_llm.fsdp2.data.sample import Sample, shifted


class StoredSamples:
    """Sample i is sample `samples[i]` of store `stores[sets[i]]`; a store is a `SampleStore`."""

    def __init__(self, stores: Sequence[Any], sets: np.ndarray, samples: np.ndarray) -> None:
        self.stores, self.sets, self.samples = stores, sets, samples

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sample, int64."""
        lengths = np.zeros(len(self), dtype=np.int64)
        for number, store in enumerate(self.stores):
            mine = self.sets == number
            lengths[mine] = store.lengths[self.samples[mine]]
        return lengths

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, labels) of a sample, labels not shifted."""
        return self.stores[int(self.sets[index])][int(self.samples[index])]

    def take(self, chosen: np.ndarray) -> "StoredSamples":
        """The samples at the given places (indices or a mask)."""
        return type(self)(self.stores, self.sets[chosen], self.samples[chosen])

    def __getitem__(self, index: int) -> Sample:
        ids, labels = self.tokens(index)
        return Sample(ids, shifted(labels))


class PackedSamples:
    """Row p holds the samples members[offsets[p] : offsets[p + 1]] one after the other.

    With `isolate` each is a segment of its own and its last position has no target; else they are one text.
    """

    def __init__(self, samples: StoredSamples, members: np.ndarray, offsets: np.ndarray, *, isolate: bool) -> None:
        self._samples, self._members, self._offsets, self._isolate = samples, members, offsets, isolate

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Sample:
        members = self._members[self._offsets[index] : self._offsets[index + 1]]
        parts = [self._samples.tokens(int(member)) for member in members]
        ids = np.concatenate([ids for ids, _ in parts])
        if not self._isolate:
            return Sample(ids, shifted(np.concatenate([labels for _, labels in parts])))
        labels = np.concatenate([shifted(labels) for _, labels in parts])
        return Sample(ids, labels, [len(ids) for ids, _ in parts])
