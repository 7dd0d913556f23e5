"""In which order the samples of instruction data, pairs or prompts come: epochs, shuffling, blending.

by size (no weights)   whole epochs of all sets together, as many as hold the samples asked for; the sets alternate
                       in proportion to their sizes
by weight              as many samples as are asked for, the sets alternate in proportion to their weights, each
                       through epochs of its own
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.blending import blend_order
from mindspeed_llm.tasks.preprocess.index_cache import Arrays, HoldsMaps, IndexCache, IndexRequest, index_identity
from mindspeed_llm.tasks.preprocess.sample_sets import SampleSet


@dataclass(frozen=True)
class SampleSource:
    """The samples of a set that one of train, valid and test uses."""

    samples: SampleSet
    documents: range


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """`shuffle`: "epoch" shuffles each epoch of each set by itself, "all" all samples of all epochs and sets together,
    "none" keeps the order of the files. Where `fill_up_to` is more than 1, the first samples come once more at the end,
    so that the number of samples is a multiple of it (the global batch size)."""

    seed: int
    shuffle: Literal["epoch", "all", "none"] = "epoch"
    fill_up_to: int = 1


class OrderedSamples(HoldsMaps):
    """Rows of one or several sets in the order of training; the last `num_fillers` are the first ones again."""

    def __init__(self, sets: Sequence[SampleSet], which: np.ndarray, sample: np.ndarray, num_fillers: int) -> None:
        self.num_fillers = num_fillers
        self._sets, self._which, self._sample = sets, which, sample

    def __len__(self) -> int:
        return len(self._which) + self.num_fillers

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = index % len(self._which)
        return self._sets[int(self._which[place])][int(self._sample[place])]


def ordered_samples(
    sources: Sequence[SampleSource],
    weights: Sequence[float] | None,
    num_samples: int | None,
    order: SampleOrder,
    cache: IndexCache,
    *,
    vocab_size: int | None = None,
) -> OrderedSamples:
    """At least `num_samples` samples, or one epoch of all sets where that is None.

    Every process of a job must call this. When the order is built, the numbers of the sets are looked at too, against
    `vocab_size`. Raises UserError where there are no samples, where a set with a weight has none, where weights come
    without `num_samples`, or where a set holds what is no token id.
    """
    sizes = [len(source.documents) for source in sources]
    names = [str(source.samples.prefix) for source in sources]
    if weights is not None:
        if num_samples is None:
            raise UserError("data sets with weights need a number of samples: weights alone do not say when to stop")
        empty = next(
            (name for name, size, weight in zip(names, sizes, weights, strict=True) if weight and not size), ""
        )
        if empty:
            raise UserError(f"data set {empty} has a weight, but no sample in this split")
    elif not any(sizes):
        raise UserError(f"{', '.join(names)}: there is no sample in this split; use a larger part or more data")

    def build() -> Arrays:
        for samples in {source.samples.prefix: source.samples for source in sources}.values():
            samples.check(vocab_size)
        which, sample = build_order([source.documents for source in sources], weights, num_samples, order)
        return {"which": which, "sample": sample}

    key = {
        "sets": [
            {key: index_identity(reader) for key, reader in source.samples.readers.items()}
            | {"documents": [source.documents.start, source.documents.stop]}
            for source in sources
        ],
        "weights": None if weights is None else [float(weight).hex() for weight in weights],
        "num_samples": num_samples,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "vocab_size": vocab_size,
    }
    first = sources[0].samples
    name = first.prefix.name if len(sources) == 1 else "blend"
    arrays = cache.arrays([IndexRequest(f"{name}_{first.kind}", first.prefix, key, build)])[0]
    num_fillers = -len(arrays["which"]) % order.fill_up_to
    return OrderedSamples([source.samples for source in sources], arrays["which"], arrays["sample"], num_fillers)


def build_order(
    documents: Sequence[range], weights: Sequence[float] | None, num_samples: int | None, order: SampleOrder
) -> tuple[np.ndarray, np.ndarray]:
    """(set [N] int16, number in its file [N] int64) at each place; the module says what N is.

    Each set draws its epochs from a generator of its own with the same seed, one after the other, so that a longer
    order begins as a shorter one does.
    """
    sizes = [len(part) for part in documents]
    if weights is None:
        epochs = 1 if num_samples is None else max(1, -(-num_samples // sum(sizes)))
        which, count = blend_order(sizes, epochs * sum(sizes))
    else:
        which, count = blend_order(weights, num_samples or 0)
    sample = np.empty(len(which), dtype=np.int64)
    for number, part in enumerate(documents):
        mine = np.flatnonzero(which == number)
        if len(mine):
            sample[mine] = _epochs(part, len(mine), order)[count[mine]]
    if order.shuffle == "all":
        # Another stream than that of the epochs.
        permutation = np.random.RandomState([order.seed, 1]).permutation(len(which))
        which, sample = which[permutation], sample[permutation]
    return which, sample


def _epochs(documents: range, num_samples: int, order: SampleOrder) -> np.ndarray:
    """Documents of as many epochs as hold `num_samples`, each epoch shuffled unless `order` says otherwise."""
    random = np.random.RandomState(order.seed)
    epochs = []
    for _ in range(-(-num_samples // len(documents))):
        # The type that is shuffled does not change the order, only its size in memory.
        epoch = np.arange(documents.start, documents.stop, dtype=np.int64)
        if order.shuffle != "none":
            random.shuffle(epoch)
        epochs.append(epoch)
    return np.concatenate(epochs)
