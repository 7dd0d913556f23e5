"""Packs hold every sample once and never overflow."""

import itertools

import numpy as np
import pytest

from mindspeed_llm.tasks.preprocess.packing import pack_window, plan_packs


def test_by_hand():
    # 4 first, 2 still fits; then 3, 1.
    assert pack_window([4, 2, 3, 1], 6) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("seed", range(5))
def test_every_sample_once_and_no_overflow(seed):
    random = np.random.RandomState(seed)
    lengths = random.randint(1, 65, size=500)
    members, offsets = plan_packs(lengths, 64, window=100)
    assert sorted(members.tolist()) == list(range(500))
    sums = np.add.reduceat(lengths[members], offsets[:-1])
    assert sums.max() <= 64
    # A pack stays within its window, and the packs are dense.
    windows = [set((members[a:b] // 100).tolist()) for a, b in itertools.pairwise(offsets)]
    assert all(len(window) == 1 for window in windows)
    assert lengths.sum() / (64 * len(sums)) > 0.85


def test_too_long():
    with pytest.raises(ValueError, match="a sample of 9 tokens does not fit in a pack of 8"):
        pack_window([3, 9], 8)
