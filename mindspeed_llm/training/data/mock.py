"""--mock-data: documents that are made up, the same as megatron-core's MockGPTDataset has."""

from __future__ import annotations

import numpy as np

MOCK_SPLIT = "1,1,1"
"""Training, validation and test have a third of the documents each."""

_SEED = 0
_NUM_DOCUMENTS = 100_000
_LENGTH_BELOW = 4096


class MockReader:
    """Documents that count 1, 2, 3, ... and end with the end-of-document token; of 1 to 4095 tokens each.

    It has what samples need of an indexed file: `lengths` and `get`.
    """

    def __init__(self, vocab_size: int, eod_id: int) -> None:
        self._vocab_size, self._eod_id = vocab_size, eod_id
        random = np.random.default_rng(_SEED)
        self.lengths = random.integers(1, _LENGTH_BELOW, size=_NUM_DOCUMENTS, dtype=np.int32)

    def __len__(self) -> int:
        return _NUM_DOCUMENTS

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens (default: all that remain) of a document from `offset`, int64."""
        size = int(self.lengths[index])
        stop = size if length is None else offset + length
        assert 0 <= offset <= stop <= size, f"tokens {offset} to {stop} of {size}"
        ids = np.arange(offset + 1, stop + 1, dtype=np.int64) % self._vocab_size
        if stop == size and len(ids):
            ids[-1] = self._eod_id
        return ids
