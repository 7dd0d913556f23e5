"""Which samples come when: against a plain walk through the samples, and across changes of the topology."""

import gc
import itertools
import threading
import time

import numpy as np
import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.training.data import iterator
from mindspeed_llm.training.data.datasets import Dataset
from mindspeed_llm.training.data.iterator import consumed_valid_samples, eval_batches, train_batches
from mindspeed_llm.training.data.tokens import TokenRules
from tests.training.data.helpers import arguments


class _Numbered:
    """Sample i holds the token i, and notes that it was read."""

    def __init__(self, count):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(index)
        return np.full(3, index)


def _dataset(count=200, vocab_size=10_000):
    return Dataset("training", _Numbered(count), TokenRules(vocab_size=vocab_size))


def _args(micro, global_batch, workers=0):
    return arguments(micro_batch_size=micro, global_batch_size=global_batch, num_workers=workers)


def _samples(batches):
    return [batch["tokens"][:, 0].tolist() for batch in batches]


def _walk(count, consumed, micro, rank, size):
    """Megatron's rule: collect B * R samples, give each rank its B of them."""
    batch = []
    for sample in range(consumed, count):
        batch.append(sample)
        if len(batch) == micro * size:
            yield batch[rank * micro : (rank + 1) * micro]
            batch = []


@pytest.mark.parametrize("consumed", [0, 8, 24, 13])
@pytest.mark.parametrize(("micro", "size"), [(1, 1), (2, 1), (1, 4), (2, 2), (8, 1), (4, 2), (1, 8)])
def test_equal_to_a_plain_walk(consumed, micro, size):
    # A whole number of global batches is left, so that the walk ends there too.
    dataset = _dataset(consumed + 48)
    for rank in range(size):
        ours = _samples(train_batches(dataset, _args(micro, 8), rank=rank, size=size, consumed=consumed))
        assert ours == list(_walk(len(dataset.rows), consumed, micro, rank, size))


def test_a_step_has_the_same_samples_on_any_topology():
    def steps(micro, size):
        ranks = [
            _samples(train_batches(_dataset(50), _args(micro, 12), rank=rank, size=size, consumed=2))
            for rank in range(size)
        ]
        count = 12 // (micro * size)
        # Micro step by micro step, rank by rank.
        return [
            [sample for m in range(start, start + count) for rank in ranks for sample in rank[m]]
            for start in range(0, len(ranks[0]), count)
        ]

    expected = [list(range(start, start + 12)) for start in (2, 14, 26, 38)]
    for micro, size in ((1, 1), (3, 1), (12, 1), (1, 2), (3, 2), (2, 3), (1, 12), (4, 3)):
        assert steps(micro, size) == expected


def test_each_sample_once_when_ranks_and_batches_change():
    dataset, seen, consumed = _dataset(116), [], 0
    for steps, size, micro, batch in ((3, 2, 2, 8), (2, 4, 1, 8), (2, 1, 5, 10), (4, 3, 2, 12), (8, 1, 1, 1)):
        for rank in range(size):
            batches = train_batches(dataset, _args(micro, batch), rank=rank, size=size, consumed=consumed)
            for read in _samples(itertools.islice(batches, steps * batch // (micro * size))):
                seen += read
        consumed += steps * batch
        assert sorted(seen) == list(range(consumed))
    assert consumed == len(dataset.rows)


def test_the_last_whole_global_batch_is_the_end():
    for count, expected in ((16, 4), (23, 4), (24, 6), (7, 0)):
        assert len(list(train_batches(_dataset(count), _args(2, 8), rank=0, size=2, consumed=0))) == expected
    assert not list(train_batches(_dataset(16), _args(2, 8), rank=0, size=2, consumed=16))
    assert not list(train_batches(_dataset(16), _args(2, 8), rank=0, size=2, consumed=9))


def test_evaluation_begins_again_behind_the_last_sample():
    batches = eval_batches(_dataset(10), _args(2, 4), rank=1, size=2, consumed=4)
    assert _samples(itertools.islice(batches, 4)) == [[6, 7], [0, 1], [4, 5], [8, 9]]


def test_samples_of_validation_so_far():
    # Steps 4 and 8 were evaluated with two steps of 8 samples each.
    args = arguments(eval_interval=4, eval_iters=2, global_batch_size=8)
    assert [consumed_valid_samples(args, iteration) for iteration in (0, 3, 4, 7, 8, 9)] == [0, 0, 16, 16, 32, 32]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_threads_change_nothing(workers):
    def read(workers):
        return _samples(train_batches(_dataset(), _args(2, 8, workers), rank=1, size=2, consumed=4))

    assert read(workers) == read(0)


def test_threads_read_ahead_and_no_further():
    dataset = _dataset()
    batches = train_batches(dataset, _args(1, 8, 2), rank=0, size=1, consumed=0)
    assert not dataset.rows.read
    next(batches)
    deadline = time.monotonic() + 30
    while len(dataset.rows.read) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    # Two threads have two batches each in hand beside the one that was given out.
    assert sorted(dataset.rows.read) == list(range(5))


def _reading_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-samples")]


def _wait_for_no_threads():
    deadline = time.monotonic() + 30
    while _reading_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not _reading_threads()


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_threads_end_with_the_iterator(device):
    for end in (lambda batches: batches.close(), lambda batches: None):
        batches = eval_batches(_dataset(), _args(1, 8, 2), rank=0, size=1, consumed=0, device=device)
        next(batches)
        assert _reading_threads()
        end(batches)
        del batches
        gc.collect()
        assert _wait_for_no_threads()
    list(train_batches(_dataset(16), _args(1, 8, 2), rank=0, size=1, consumed=0, device=device))
    assert _wait_for_no_threads()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mistake_in_the_data_arrives_in_its_place(workers):
    batches = train_batches(_dataset(vocab_size=9), _args(2, 4, workers), rank=0, size=1, consumed=0)
    assert _samples(itertools.islice(batches, 4)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(UserError, match=r"training data, samples 8 to 9, holds token 9, .* vocabulary has 9"):
        next(batches)
    assert _wait_for_no_threads()


def test_batches_go_to_the_device(monkeypatch):
    # The meta device stands for an accelerator; pinning needs one.
    pinned = []
    monkeypatch.setattr(iterator, "supports_pin_memory", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    batches = train_batches(_dataset(8), _args(2, 8), rank=0, size=1, consumed=0, device=torch.device("meta"))
    moved = list(batches)
    assert len(moved) == 4 and {tensor.device.type for batch in moved for tensor in batch.values()} == {"meta"}
    assert len(pinned) == 16
