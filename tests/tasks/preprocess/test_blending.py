"""The order of a blend against megatron-core's helpers, and against the rule in plain Python."""

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import blending
from mindspeed_llm.tasks.preprocess.blending import Blend, Chain, blend_order, normalized, parse_blend


def _helpers():
    return pytest.importorskip("megatron.core.datasets.helpers_cpp")


def _by_weight(weights, num_samples):
    """What megatron-core draws with normalized weights."""
    which, sample = np.zeros(num_samples, dtype=np.int16), np.zeros(num_samples, dtype=np.int64)
    _helpers().build_blending_indices(which, sample, normalized(weights), len(weights), num_samples, False)
    return which, sample


def _by_rule(weights, num_samples):
    """The rule, place by place, in Python's floats."""
    shares, taken, rows = normalized(weights).tolist(), [0] * len(weights), []
    for place in range(num_samples):
        lag = [share * max(place, 1) - count for share, count in zip(shares, taken, strict=True)]
        rows.append((lag.index(max(lag)), taken[lag.index(max(lag))]))
        taken[rows[-1][0]] += 1
    return rows


def _same(ours, theirs):
    return all(np.array_equal(mine, its) for mine, its in zip(ours, theirs, strict=True))


BY_HAND = [[0.3, 0.7], [0.001, 0.999], [5.0, 3.0, 2.0], [1, 1, 1, 1], [1e-7, 1], [0.5, 0.25, 0.25], [7], [1 / 3] * 3]


@pytest.mark.parametrize("weights", BY_HAND)
@pytest.mark.parametrize("num_samples", [0, 1, 2, 1000, 20011])
def test_equal_to_megatron_core(weights, num_samples):
    assert _same(blend_order(weights, num_samples), _by_weight(weights, num_samples))


def test_the_rule_in_python():
    which, sample = blend_order([5, 3, 2], 3000)
    assert list(zip(which.tolist(), sample.tolist(), strict=True)) == _by_rule([5, 3, 2], 3000)


def _random_weights(random, kind):
    count = random.choice([2, 3, 4, 7, 20, 150])
    if kind == "even":
        return random.rand(count) + 1e-3
    if kind == "far apart":
        return 10.0 ** (-6 * random.rand(count))
    if kind == "few values":  # many ties
        return random.randint(1, 4, count).astype(float)
    return random.randint(1, 100000, count).astype(float)  # numbers of samples


@pytest.mark.parametrize("kind", ["even", "far apart", "few values", "sizes"])
def test_random_weights(kind):
    random = np.random.RandomState(len(kind))
    for _ in range(25):
        weights = _random_weights(random, kind)
        num_samples = int(random.randint(1, 60000))
        assert _same(blend_order(weights, num_samples), _by_weight(weights, num_samples)), (weights, num_samples)


def test_any_guess_leads_to_the_same_order(monkeypatch):
    # What is taken before each stretch is only guessed; nothing at all is the worst guess.
    expected = blend_order([3, 1, 2], 20000)
    monkeypatch.setattr(blending, "_guess", lambda shares, places: np.zeros((len(shares), len(places))))
    assert _same(blend_order([3, 1, 2], 20000), expected)


def test_other_rules_differ_from_megatron_core(monkeypatch):
    weights = [1, 2, 1]
    theirs = _by_weight(weights, 4000)

    with monkeypatch.context() as patch:  # the last of equal ones
        patch.setattr(blending, "_furthest_behind", lambda lag: len(lag) - 1 - lag[::-1].argmax(axis=0))
        assert not _same(blend_order(weights, 4000), theirs)
    with monkeypatch.context() as patch:  # place 0 as 0, not as 1
        patch.setattr(blending.np, "maximum", lambda places, one: places)
        assert not _same(blend_order(weights, 4000), theirs)


@pytest.mark.parametrize("seed", range(5))
def test_numbers_of_samples_are_used_up_exactly(seed):
    random = np.random.RandomState(seed)
    sizes = random.randint(1, 3000, random.randint(2, 9))
    total = int(sizes.sum())
    which, sample = np.zeros(total, dtype=np.int16), np.zeros(total, dtype=np.int64)
    _helpers().build_exhaustive_blending_indices(which, sample, sizes, len(sizes))
    ours = blend_order(sizes, total)
    assert _same(ours, (which, sample))
    assert np.bincount(ours[0]).tolist() == sizes.tolist()
    assert all(sorted(ours[1][ours[0] == i].tolist()) == list(range(size)) for i, size in enumerate(sizes))


def test_a_weight_of_zero_is_never_taken():
    # megatron-core refuses it; its rule alone would take it wherever the others are level.
    assert 0 in _by_weight([0, 1, 1], 100)[0]
    which, sample = blend_order([0, 1, 0, 1], 100)
    assert np.bincount(which, minlength=4).tolist() == [0, 50, 0, 50]
    assert sample[which == 3].tolist() == list(range(50))


def test_too_many_data_sets():
    with pytest.raises(UserError, match="a blend of 32768 data sets; at most 32767"):
        blend_order(np.ones(32768), 10)


def test_parse_blend():
    utils = pytest.importorskip("megatron.core.datasets.utils")
    for items in (["0.3", "a", "0.7", "b"], ["a"], ["a", "b"], ["a", "b", "c"], ["1", "a"], ["30", " a ", "70", "b"]):
        names, weights = parse_blend(items, field="--data-path")
        assert (names, weights) == utils.get_blend_from_list(items)
    assert parse_blend([0.3, "a", 0, "b"], field="x") == (["a", "b"], [0.3, 0.0])
    assert parse_blend(["2024"], field="x") == (["2024"], None)
    assert parse_blend([], field="x") == ([], None)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["0.3", "a", "b", "0.7"], "--data-path: '0.3 a b 0.7' is neither names alone nor a weight before every name"),
        (["0.3", "a", "b"], "neither names alone"),
        (["a", "0.3", "b", "0.7"], "neither names alone"),
        (["-1", "a", "2", "b"], r"--data-path: weights \[-1.0, 2.0\]; expected numbers from 0 on"),
        (["nan", "a", "2", "b"], "expected numbers from 0 on"),
        (["0", "a", "0", "b"], "not all 0"),
    ],
)
def test_mistakes_in_blends(items, message):
    with pytest.raises(UserError, match=message):
        parse_blend(items, field="--data-path")


def test_rows():
    a, b = [10, 11, 12], [20, 21]
    chain = Chain([a, b])
    assert len(chain) == 5 and [chain[i] for i in range(5)] == a + b
    blend = Blend([a, b], np.array([1, 0, 0]), np.array([1, 0, 2]))
    assert len(blend) == 3 and [blend[i] for i in range(3)] == [21, 10, 12]
