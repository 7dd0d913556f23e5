"""Fixed-length pretraining samples over an indexed file, in the order that megatron-core's GPTDataset gives them.

    documents    |aaaaaaa|bb|cccccccccc|ddd|         shuffled, laid end to end
    samples      |0000|1111|2222|3333|4444|          cut every S tokens; each has the first token of the next as well,
                                                     so that each position has a target
    order        |3|0|4|1|2|                         shuffled

Documents are shuffled over all epochs jointly, and the last epoch apart from the others when less than 80 % of it is
used; so are the samples. With the same seed, documents and S the samples equal megatron-core's one by one.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mindspeed_llm.tasks.preprocess.index_cache import HoldsMaps
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader

_SEPARATE_LAST_EPOCH_BELOW = 0.80
# Documents that are laid end to end at a time; bounds the memory of building an index.
_BLOCK = 1 << 22


def samples_per_epoch(num_tokens: int, sequence_length: int, *, extra_token: bool = True) -> int:
    """Number of samples in one pass over `num_tokens` tokens."""
    return max(num_tokens - extra_token, 0) // sequence_length


def count_tokens(lengths: np.ndarray, documents: range) -> int:
    """Number of tokens of consecutive documents."""
    return int(lengths[documents.start : documents.stop].sum(dtype=np.int64))


@dataclass(frozen=True)
class SampleIndex(HoldsMaps):
    """`documents`: document at each place of the concatenation; `starts` [N + 1, 2]: place and offset where each sample
    starts; `shuffle` [N]: the order in which samples are given out."""

    documents: np.ndarray
    starts: np.ndarray
    shuffle: np.ndarray

    @classmethod
    def build(
        cls,
        lengths: np.ndarray,
        documents: range,
        num_samples: int | None,
        sequence_length: int,
        seed: int,
        *,
        extra_token: bool = True,
    ) -> "SampleIndex":
        """Build the index for at least `num_samples` samples of `sequence_length` tokens; None takes one epoch.

        `lengths` are the lengths of all sequences of the file, `documents` the ones to use. Without `extra_token` a
        sample holds only its own S tokens. Raises ValueError when the documents hold no tokens.
        """
        tokens = count_tokens(lengths, documents)
        if tokens == 0:
            raise ValueError("the documents hold no tokens")
        num_epochs, apart_from = plan_epochs(tokens, num_samples, sequence_length, extra_token=extra_token)

        random = np.random.RandomState(seed)
        once = np.arange(documents.start, documents.stop, dtype=np.int32)
        parts = [num_epochs] if apart_from is None else [num_epochs - 1, 1]
        order = _joined(_shuffled(random, np.tile(once, epochs)) for epochs in parts)

        total = samples_per_epoch(num_epochs * tokens, sequence_length, extra_token=extra_token)
        starts = _sample_starts(np.array(lengths), order, total, sequence_length, extra_token=extra_token)

        dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
        bounds = [0, total] if apart_from is None else [0, apart_from, total]
        shuffle = _joined(
            _shuffled(random, np.arange(start, stop, dtype=dtype)) for start, stop in itertools.pairwise(bounds)
        )
        return cls(order, starts, shuffle)


def plan_epochs(
    num_tokens: int, num_samples: int | None, sequence_length: int, *, extra_token: bool = True
) -> tuple[int, int | None]:
    """How many epochs of `num_tokens` tokens hold `num_samples` samples.

    Returns the number of epochs, and the number of samples before the last one where that is shuffled apart (None:
    where it is not).
    """
    if num_samples is None:
        return 1, None
    num_epochs = max(1, -(-(num_samples * sequence_length + extra_token) // num_tokens))
    if num_epochs == 1:
        return 1, None
    before = samples_per_epoch((num_epochs - 1) * num_tokens, sequence_length, extra_token=extra_token)
    in_one = samples_per_epoch(num_tokens, sequence_length, extra_token=extra_token)
    is_apart = num_samples - before < int(_SEPARATE_LAST_EPOCH_BELOW * in_one)
    return num_epochs, before if is_apart else None


def _shuffled(random: np.random.RandomState, items: np.ndarray) -> np.ndarray:
    random.shuffle(items)
    return items


def _joined(parts: Iterator[np.ndarray]) -> np.ndarray:
    """The parts one after the other; a single one is not copied."""
    arrays = list(parts)
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _sample_starts(
    lengths: np.ndarray, order: np.ndarray, num_samples: int, sequence_length: int, *, extra_token: bool
) -> np.ndarray:
    """Place and offset of token k * S for k = 0..N, [N + 1, 2]; int32 where that is wide enough.

    Without the extra token a place is where token k * S - 1 ends, as in megatron-core: the end of one document, not the
    beginning of the next.
    """
    is_narrow = max(len(order), int(lengths.max())) <= np.iinfo(np.int32).max
    starts = np.zeros((num_samples + 1, 2), dtype=np.int32 if is_narrow else np.int64)
    laid, done = 0, 0
    for first in range(0, len(order), _BLOCK):
        sizes = lengths[order[first : first + _BLOCK]]
        ends = np.cumsum(sizes, dtype=np.int64) + laid
        laid = int(ends[-1])
        stop = min((laid - extra_token) // sequence_length, num_samples) + 1
        if stop > done:
            positions = np.arange(done, stop, dtype=np.int64) * sequence_length
            places = np.searchsorted(ends, positions, side="right" if extra_token else "left")
            starts[done:stop, 0] = places + first
            starts[done:stop, 1] = positions - (ends[places] - sizes[places])
            done = stop
    # megatron-core starts at place 0 even when the first document is empty.
    starts[0] = 0
    return starts


class Documents(Protocol):
    """Documents by number, as `IndexedReader` has them."""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...


class PretrainSamples:
    """Sample i: S + 1 token ids (S without `extra_token`), int64, following `index.shuffle`."""

    def __init__(self, reader: Documents, index: SampleIndex, *, extra_token: bool = True) -> None:
        self.reader, self.index, self._extra = reader, index, int(extra_token)

    def __len__(self) -> int:
        return len(self.index.shuffle)

    def __getitem__(self, position: int) -> np.ndarray:
        return np.concatenate(list(self._parts(int(self.index.shuffle[position]))), dtype=np.int64)

    def _parts(self, sample: int) -> Iterator[np.ndarray]:
        (place, offset), (last_place, last_offset) = self.index.starts[sample : sample + 2].tolist()
        for document in self.index.documents[place:last_place].tolist():
            yield self.reader.get(document, offset)
            offset = 0
        yield self.reader.get(int(self.index.documents[last_place]), offset, last_offset - offset + self._extra)


class SequentialSamples:
    """Every token of the documents once, in file order, in samples of up to S + 1 tokens; the last may be shorter.

    Used for evaluation: sample k starts at token k * S and every token but the first is a target exactly once.
    """

    def __init__(self, reader: IndexedReader, documents: range, sequence_length: int) -> None:
        self.reader, self.documents, self.sequence_length = reader, documents, sequence_length
        self._ends = np.cumsum(reader.lengths[documents.start : documents.stop], dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __len__(self) -> int:
        return -(-max(self.num_tokens - 1, 0) // self.sequence_length)

    def __getitem__(self, position: int) -> np.ndarray:
        begin = position * self.sequence_length
        end = min(begin + self.sequence_length + 1, self.num_tokens)
        parts = []
        place = int(np.searchsorted(self._ends, begin, side="right"))
        while begin < end:
            start = int(self._ends[place]) - int(self.reader.lengths[self.documents[place]])
            stop = min(end, int(self._ends[place]))
            parts.append(self.reader.get(self.documents[place], begin - start, stop - begin))
            begin, place = stop, place + 1
        return np.concatenate(parts).astype(np.int64)
