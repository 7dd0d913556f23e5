"""Which sample comes at which position of training, by arithmetic alone.

Positions count samples over the whole run; epochs follow each other without a gap. A global batch of G samples that
begins at position p holds [p, p + G); micro step m, rank r, row j takes position p + (m * ranks + r) * rows + j. So a
global batch is the same however it is split over ranks, micro batches and accumulation, and a run that goes on with
another G goes on at the next position.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

FILLER = -1
"""The index of a row that only fills up a batch."""


class EpochOrder:
    """Every sample once per epoch, in an order drawn from (seed, epoch); unshuffled where `shuffle` is off."""

    def __init__(self, num_samples: int, *, seed: int, shuffle: bool) -> None:
        self.num_samples, self._seed, self._shuffle = num_samples, seed, shuffle
        self._epoch, self._permutation = -1, np.zeros(0, dtype=np.int64)

    def __getitem__(self, position: int) -> int:
        epoch, place = divmod(position, self.num_samples)
        if not self._shuffle:
            return place
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, permutation(self.num_samples, self._seed, epoch)
        return int(self._permutation[place])


class IndexOrder:
    """Positions are indices: the data set itself is laid out in the order of training (over all epochs)."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __getitem__(self, position: int) -> int:
        return position


def permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch; a generator whose stream numpy has frozen, so that a resumed run sees the same order."""
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch))))
    return random.permutation(size)


@dataclass(frozen=True, kw_only=True)
class DataPosition:
    """Where the data of a run stands: optimizer steps done, samples taken, and the layouts of manager `mg`.

    `layouts` are the lengths of the sample index's parts, so that a resumed run lays the samples out as the first one
    did.
    """

    step: int = 0
    samples: int = 0
    layouts: tuple[int, ...] = ()


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is split: `rank` of `num_ranks`, `micro_batch_size` rows, `accumulation` micro steps."""

    rank: int
    num_ranks: int
    micro_batch_size: int
    accumulation: int

    @property
    def global_batch_size(self) -> int:
        return self.num_ranks * self.micro_batch_size * self.accumulation

    def row_positions(self, start: int, micro_step: int) -> range:
        """Positions of this rank's rows in a micro step of the global batch that begins at position `start`."""
        first = start + (micro_step * self.num_ranks + self.rank) * self.micro_batch_size
        return range(first, first + self.micro_batch_size)

    def rows(self, order: EpochOrder | IndexOrder, start: int, num_positions: int) -> Iterator[list[int]]:
        """Yield this rank's sample indices in the global batch that begins at position `start`, one list per micro
        step; positions from `num_positions` on are fillers.
        """
        for micro_step in range(self.accumulation):
            positions = self.row_positions(start, micro_step)
            yield [order[position] if position < num_positions else FILLER for position in positions]
