"""Fixed-length pretraining samples over an indexed file, in the order that megatron-core's GPTDataset gives them.

Documents are shuffled (over all epochs jointly; the last epoch apart when less than 80 % of it is used), laid end to
end, and cut every S tokens; a sample has S + 1 tokens, so that the last token of one is the first of the next. Then the
samples are shuffled. With the same seed, documents and S the samples equal megatron-core's one by one.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader

_SEPARATE_LAST_EPOCH_BELOW = 0.80


def split_documents(num_documents: int, split: str) -> list[np.ndarray]:
    """Cut the documents in order into train, valid and test by proportions such as "98,1,1"; int32 indices each."""
    shares = [float(part) for part in split.split(",") if part.strip()]
    shares += [0.0] * (3 - len(shares))
    bounds = np.cumsum([0.0] + [share / sum(shares) for share in shares])
    edges = [round(float(bound) * num_documents) for bound in bounds]
    return [np.arange(start, stop, dtype=np.int32) for start, stop in itertools.pairwise(edges)]


def samples_per_epoch(num_tokens: int, sequence_length: int) -> int:
    """Number of samples in one pass over `num_tokens` tokens."""
    return max(num_tokens - 1, 0) // sequence_length


@dataclass(frozen=True)
class SampleIndex:
    """`documents`: document at each place of the concatenation; `starts` [N + 1, 2]: place and offset where each sample
    starts; `shuffle` [N]: the order in which samples are given out."""

    documents: np.ndarray
    starts: np.ndarray
    shuffle: np.ndarray

    @classmethod
    def build(
        cls, lengths: np.ndarray, documents: np.ndarray, num_samples: int, sequence_length: int, seed: int
    ) -> "SampleIndex":
        """Build the index for at least `num_samples` samples of `sequence_length` tokens.

        `lengths` are the lengths of all sequences of the file, `documents` the ones to use. Raises ValueError when
        these hold no tokens.
        """
        tokens_per_epoch = int(lengths[documents].sum(dtype=np.int64))
        if tokens_per_epoch == 0:
            raise ValueError("the documents hold no tokens")
        num_epochs = max(1, -(-(num_samples * sequence_length + 1) // tokens_per_epoch))
        in_earlier_epochs = ((num_epochs - 1) * tokens_per_epoch - 1) // sequence_length
        separate = False
        if num_epochs > 1:
            in_one_epoch = (tokens_per_epoch - 1) // sequence_length
            separate = num_samples - in_earlier_epochs < int(_SEPARATE_LAST_EPOCH_BELOW * in_one_epoch)

        random = np.random.RandomState(seed)
        parts = [num_epochs - 1, 1] if separate else [num_epochs]
        order = []
        for epochs in parts:
            block = np.tile(documents.astype(np.int32), epochs)
            random.shuffle(block)
            order.append(block)
        document_order = np.concatenate(order)

        starts = _sample_starts(lengths[document_order], num_epochs * tokens_per_epoch, sequence_length)
        total = len(starts) - 1
        dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
        bounds = [0, in_earlier_epochs, total] if separate else [0, total]
        shuffled = []
        for start, stop in itertools.pairwise(bounds):
            block = np.arange(start, stop, dtype=dtype)
            random.shuffle(block)
            shuffled.append(block)
        return cls(document_order, starts, np.concatenate(shuffled))


def _sample_starts(lengths: np.ndarray, num_tokens: int, sequence_length: int) -> np.ndarray:
    """Place and offset of token k * S for k = 0..N, [N + 1, 2] int64; empty documents hold no token."""
    num_samples = (num_tokens - 1) // sequence_length
    ends = np.cumsum(lengths, dtype=np.int64)
    positions = np.arange(num_samples + 1, dtype=np.int64) * sequence_length
    places = np.searchsorted(ends, positions, side="right")
    offsets = positions - (ends[places] - lengths[places])
    # megatron-core starts at place 0 even when the first document is empty.
    places[0], offsets[0] = 0, 0
    return np.stack([places, offsets], axis=1)


class PretrainSamples:
    """Sample i: S + 1 token ids (int64), following `index.shuffle`."""

    def __init__(self, reader: IndexedReader, index: SampleIndex, sequence_length: int) -> None:
        self.reader, self.index, self.sequence_length = reader, index, sequence_length

    def __len__(self) -> int:
        return len(self.index.shuffle)

    def __getitem__(self, position: int) -> np.ndarray:
        return np.concatenate(list(self._parts(int(self.index.shuffle[position])))).astype(np.int64)

    def _parts(self, sample: int) -> Iterator[np.ndarray]:
        (place, offset), (last_place, last_offset) = self.index.starts[sample], self.index.starts[sample + 1]
        while place < last_place:
            yield self.reader.get(int(self.index.documents[place]), offset=int(offset))
            place, offset = place + 1, 0
        yield self.reader.get(int(self.index.documents[place]), int(offset), int(last_offset) - int(offset) + 1)


class SequentialSamples:
    """Every token of the documents once, in file order, in samples of up to S + 1 tokens; the last may be shorter.

    Used for evaluation: sample k starts at token k * S and every token but the first is a target exactly once.
    """

    def __init__(self, reader: IndexedReader, documents: np.ndarray, sequence_length: int) -> None:
        self.reader, self.documents, self.sequence_length = reader, documents, sequence_length
        self._ends = np.cumsum(reader.lengths[documents], dtype=np.int64)

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
            parts.append(self.reader.get(int(self.documents[place]), begin - start, stop - begin))
            begin, place = stop, place + 1
        return np.concatenate(parts).astype(np.int64)


def blend_order(weights: list[float], num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Which data set, and which of its samples, stands at each place of a blend.

    The rule of megatron-core's BlendedDataset: at each place the data set that lags furthest behind its share is taken.
    Returns (data set int16, sample int64).
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    taken = [0] * len(shares)
    which, sample = np.zeros(num_samples, dtype=np.int16), np.zeros(num_samples, dtype=np.int64)
    for place in range(num_samples):
        at = max(place, 1)
        errors = [share * at - count for share, count in zip(shares, taken, strict=True)]
        chosen = errors.index(max(errors))
        which[place], sample[place] = chosen, taken[chosen]
        taken[chosen] += 1
    return which, sample
