"""Preference pairs: a chosen and a rejected reply to one prompt, stored, given out and put into micro batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_llm.fsdp2.data.lf_samples import StoredSamples
from mindspeed_llm.fsdp2.data.sample import Collator, Sample, shifted
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from mindspeed_llm.tasks.preprocess.pairwise_work import PAIRWISE_KEYS
from mindspeed_llm.tasks.preprocess.sample_store import key_prefix


class Pair(NamedTuple):
    """Both sides of a pair, labels shifted as in `Sample`."""

    chosen: Sample
    rejected: Sample

    @property
    def labels(self) -> np.ndarray:
        """The labels of both sides, one after the other."""
        return np.concatenate([self.chosen.labels, self.rejected.labels])

    def text(self) -> tuple[np.ndarray, np.ndarray]:
        """As `Sample.text`, of the chosen side."""
        return self.chosen.text()


class PairStore:
    """Pairs of a store: (chosen ids, chosen labels, rejected ids, rejected labels), labels not shifted."""

    def __init__(self, prefix: str | Path) -> None:
        self._readers = [IndexedReader(key_prefix(prefix, key)) for key in PAIRWISE_KEYS]
        self.lengths = self._readers[0].lengths + self._readers[2].lengths

    def __len__(self) -> int:
        return len(self._readers[0])

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        return tuple(reader[index] for reader in self._readers)


class StoredPairs(StoredSamples):
    """As `StoredSamples`, of `PairStore`s."""

    def __getitem__(self, index: int) -> Pair:  # type: ignore[override]
        chosen, chosen_labels, rejected, rejected_labels = self.stores[int(self.sets[index])][int(self.samples[index])]
        return Pair(Sample(chosen, shifted(chosen_labels)), Sample(rejected, shifted(rejected_labels)))


@dataclass(frozen=True)
class PairCollator:
    """Stack pairs to one micro batch of twice as many rows: first all chosen sides, then all rejected ones in the same
    order. `num_samples` counts pairs. A pair that is None fills up, as in `Collator`.
    """

    collator: Collator

    def __call__(self, pairs: Sequence[Pair | None]) -> dict[str, Any]:
        rows = [None if pair is None else pair.chosen for pair in pairs]
        rows += [None if pair is None else pair.rejected for pair in pairs]
        return self.collator(rows) | {"num_samples": sum(pair is not None for pair in pairs)}
