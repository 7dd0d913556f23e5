"""Mixing against the datasets library, and by counting."""

import numpy as np
import pytest

from mindspeed_llm.tasks.preprocess.mixing import mix, resample


@pytest.mark.parametrize(
    ("strategy", "stopping"),
    [("interleave_under", "first_exhausted"), ("interleave_over", "all_exhausted")],
)
def test_turns_equal_the_datasets_library(strategy, stopping):
    datasets = pytest.importorskip("datasets")
    sizes = [3, 5, 2]
    sets = [datasets.Dataset.from_dict({"x": [f"{n}/{i}" for i in range(size)]}) for n, size in enumerate(sizes)]
    expected = datasets.interleave_datasets(sets, stopping_strategy=stopping)["x"]
    assert [f"{n}/{i}" for n, i in zip(*mix(sizes, strategy), strict=True)] == list(expected)


def test_concat():
    sets, samples = mix([2, 3])
    assert (sets.tolist(), samples.tolist()) == ([0, 0, 1, 1, 1], [0, 1, 0, 1, 2])


def test_draws_follow_the_probabilities_and_stop_where_they_should():
    sizes, shares = [300, 10_000], [0.25, 0.75]
    sets, samples = mix(sizes, "interleave_under", shares, seed=1)
    assert (sets == 0).sum() == 300 and sets[-1] == 0
    assert abs((sets == 0).mean() - 0.25) < 0.03
    assert samples[sets == 1].tolist() == list(range((sets == 1).sum()))

    sets, samples = mix(sizes, "interleave_over", shares, seed=1)
    assert (sets == 1).sum() == 10_000 and sets[-1] == 1
    # The small set starts again: all its samples come equally often, give or take one.
    counts = np.bincount(samples[sets == 0], minlength=300)
    assert counts.max() - counts.min() <= 1 and counts.min() >= 9
    again = mix(sizes, "interleave_over", shares, seed=1)
    assert (again[0] == sets).all() and (mix(sizes, "interleave_over", shares, seed=2)[0][:100] != sets[:100]).any()


def test_resample():
    assert sorted(resample(5, 3, 0).tolist()) == sorted(set(resample(5, 3, 0).tolist()))
    assert np.bincount(resample(5, 13, 0)).tolist().count(3) == 3
