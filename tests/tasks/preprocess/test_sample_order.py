"""The order of samples: epochs, shuffling, splits and blends, counted and compared with plain numpy."""

import collections
import itertools

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import sample_order
from mindspeed_llm.tasks.preprocess.index_cache import IndexCache
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedWriter
from mindspeed_llm.tasks.preprocess.sample_order import SampleOrder, SampleSource, build_order, ordered_samples
from mindspeed_llm.tasks.preprocess.sample_sets import SampleSet
from mindspeed_llm.tasks.preprocess.sample_store import key_prefix
from mindspeed_llm.tasks.preprocess.splits import split_documents


def _set(prefix, count, first=0):
    """Sample i has one token, first + i."""
    for key in ("input_ids", "labels"):
        with IndexedWriter(key_prefix(prefix, key)) as writer:
            writer.add_many(np.arange(first, first + count), np.ones(count))
    return SampleSet(prefix, "instruction")


def _ids(rows):
    return [int(rows[index]["input_ids"][0]) for index in range(len(rows))]


def _single(count, num_samples=None, **order):
    """The documents of one set of `count` samples in order."""
    return build_order([range(count)], None, num_samples, SampleOrder(seed=3, **order))[1].tolist()


def test_each_epoch_is_shuffled_by_itself():
    # The order that upstream draws: one generator, an epoch after the other.
    random, expected = np.random.RandomState(3), []
    for _ in range(3):
        epoch = np.arange(10, dtype=np.uint32)
        random.shuffle(epoch)
        expected += epoch.tolist()
    assert _single(10, 21) == expected
    assert _single(10, 30) == expected and _single(10, 31)[:30] == expected
    assert _single(10) == expected[:10]
    assert len(set(map(tuple, np.array(expected).reshape(3, 10).tolist()))) == 3


def test_unshuffled_and_all_together():
    assert _single(4, 9, shuffle="none") == [0, 1, 2, 3] * 3
    mixed = _single(50, 150, shuffle="all")
    assert collections.Counter(mixed) == dict.fromkeys(range(50), 3)
    assert sorted(mixed[:50]) != list(range(50))
    assert mixed == _single(50, 150, shuffle="all") != _single(50, 150)


def test_seeds_give_other_orders():
    one, other = (build_order([range(50)], None, None, SampleOrder(seed=seed))[1].tolist() for seed in (1, 2))
    assert sorted(one) == sorted(other) == list(range(50)) and one != other


def test_blends_by_size_hold_every_sample_once_an_epoch():
    which, sample = build_order([range(5), range(2, 17)], None, 25, SampleOrder(seed=0))
    assert len(which) == 40
    for epoch in (slice(0, 20), slice(20, 40)):
        assert sorted(sample[epoch][which[epoch] == 0].tolist()) == list(range(5))
        assert sorted(sample[epoch][which[epoch] == 1].tolist()) == list(range(2, 17))
    # In proportion all along.
    assert {int((which[start : start + 4] == 0).sum()) for start in range(0, 40, 4)} == {1}


def test_rare_data_over_many_epochs():
    which, sample = build_order([range(3), range(7)], [0.001, 0.999], 10_000, SampleOrder(seed=0))
    assert np.bincount(which).tolist() == [10, 9990]
    for number, size, drawn in ((0, 3, 10), (1, 7, 9990)):
        counts = np.bincount(sample[which == number], minlength=size)
        assert counts.sum() == drawn and set(counts.tolist()) <= {drawn // size, -(-drawn // size)}
    again = build_order([range(3), range(7)], [0.001, 0.999], 10_000, SampleOrder(seed=0))
    assert all(np.array_equal(one, other) for one, other in zip((which, sample), again, strict=True))


def test_a_weight_of_zero_and_a_set_given_twice():
    which, _ = build_order([range(3), range(0), range(3)], [1, 0, 1], 12, SampleOrder(seed=0))
    assert np.bincount(which).tolist() == [6, 0, 6]
    which, sample = build_order([range(3), range(3)], None, None, SampleOrder(seed=0))
    assert collections.Counter(sample.tolist()) == dict.fromkeys(range(3), 2)


def test_rows(tmp_path):
    one, two = _set(tmp_path / "one", 20), _set(tmp_path / "two", 60, first=100)
    parts = [split_documents(len(samples), "80,10,10") for samples in (one, two)]
    seen = []
    for number in range(3):
        sources = [SampleSource(samples, part[number]) for samples, part in zip((one, two), parts, strict=True)]
        seen.append(_ids(ordered_samples(sources, None, None, SampleOrder(seed=1), IndexCache())))
    assert [len(ids) for ids in seen] == [64, 8, 8]
    assert sorted(itertools.chain(*seen)) == [*range(20), *range(100, 160)]
    assert sorted(seen[1]) == [16, 17, *range(148, 154)]


def test_the_last_batch_is_filled_up(tmp_path):
    source = SampleSource(_set(tmp_path / "one", 5), range(5))
    rows = ordered_samples([source], None, None, SampleOrder(seed=1, fill_up_to=4), IndexCache())
    ids = _ids(rows)
    assert len(rows) == 8 and rows.num_fillers == 3 and ids[5:] == ids[:3]
    rows = ordered_samples([source], None, None, SampleOrder(seed=1, fill_up_to=12), IndexCache())
    assert _ids(rows) == ids[:5] + ids[:5] + ids[:2]
    with pytest.raises(IndexError):
        rows[12]


def test_the_order_is_cached_and_follows_the_data(tmp_path, monkeypatch):
    calls = []
    build = sample_order.build_order
    monkeypatch.setattr(sample_order, "build_order", lambda *arguments: calls.append(1) or build(*arguments))

    def rows(seed=1, num_samples=None, shuffle="epoch", part=range(20), weights=None, vocab_size=None):
        source = SampleSource(SampleSet(tmp_path / "one", "instruction"), part)
        order = SampleOrder(seed=seed, shuffle=shuffle)
        return _ids(ordered_samples([source], weights, num_samples, order, IndexCache(), vocab_size=vocab_size))

    _set(tmp_path / "one", 20)
    changes = [{}, {"seed": 2}, {"num_samples": 7}, {"shuffle": "all"}, {"part": range(9)}, {"vocab_size": 300},
               {"num_samples": 9, "weights": [1.0]}]  # fmt: skip
    first = [rows(**change) for change in changes]
    assert len(calls) == len(changes)
    assert [rows(**change) for change in changes] == first and len(calls) == len(changes)
    _set(tmp_path / "one", 20, first=200)
    assert rows() == [number + 200 for number in first[0]] and len(calls) == len(changes) + 1


def test_mistakes(tmp_path):
    empty, full = (SampleSource(_set(tmp_path / "one", 5), part) for part in (range(0), range(5)))
    order, cache = SampleOrder(seed=1), IndexCache()
    with pytest.raises(UserError, match="one: there is no sample in this split"):
        ordered_samples([empty], None, 5, order, cache)
    with pytest.raises(UserError, match="one has a weight, but no sample in this split"):
        ordered_samples([full, empty], [0.5, 0.5], 5, order, cache)
    with pytest.raises(UserError, match="weights need a number of samples"):
        ordered_samples([full], [1.0], None, order, cache)
    with pytest.raises(UserError, match=r"one: input_ids of sample 3 holds 3; .* vocabulary's size 3"):
        ordered_samples([full], None, None, order, cache, vocab_size=3)
