"""Mixing against the datasets library, and by counting."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import mixing
from mindspeed_llm.tasks.preprocess.dataset_info import resolve_datasets
from mindspeed_llm.tasks.preprocess.mixing import interleaved, mix, mixed_records, resample

STOPPING = {"interleave_under": "first_exhausted", "interleave_over": "all_exhausted"}


def _library(sizes, strategy, probabilities, seed):
    """What the datasets library gives: "set/sample" at each place."""
    datasets = pytest.importorskip("datasets")
    sets = [datasets.Dataset.from_dict({"x": [f"{n}/{i}" for i in range(size)]}) for n, size in enumerate(sizes)]
    if strategy == "concat":
        return list(datasets.concatenate_datasets(sets)["x"])
    options = {"probabilities": probabilities, "seed": seed, "stopping_strategy": STOPPING[strategy]}
    return list(datasets.interleave_datasets(sets, **options)["x"])


def _iterators(sizes, strategy, probabilities, seed):
    opens = [lambda n=n, size=size: iter([f"{n}/{i}" for i in range(size)]) for n, size in enumerate(sizes)]
    return list(interleaved(opens, [f"set {n}" for n in range(len(sizes))], strategy, probabilities, seed))


@pytest.mark.parametrize("strategy", ["concat", *STOPPING])
@pytest.mark.parametrize("probabilities", [None, [0.2, 0.5, 0.3], [0.05, 0.05, 0.9]])
@pytest.mark.parametrize("sizes", [[3, 5, 2], [2, 5, 3], [4, 4, 4], [1, 70, 1300]])
def test_every_place_equals_the_datasets_library(sizes, strategy, probabilities):
    if strategy == "concat":
        probabilities = None
    for seed in (1, 42):
        expected = _library(sizes, strategy, probabilities, seed)
        found = mix(sizes, strategy, probabilities, seed)
        assert [f"{n}/{i}" for n, i in zip(*found, strict=True)] == expected
        assert _iterators(sizes, strategy, probabilities, seed) == expected


@pytest.mark.parametrize("fault", ["other draws", "other blocks"])
def test_the_comparison_with_the_library_finds_other_draws(monkeypatch, fault):
    def drawn(count, probabilities, seed):
        random = np.random.default_rng(seed + (fault == "other draws"))
        while True:
            yield random.choice(count, size=1000, p=probabilities)[: 1000 if fault == "other draws" else 999]

    monkeypatch.setattr(mixing, "_drawn_blocks", drawn)
    sizes, shares = [700, 1500], [0.4, 0.6]
    assert _iterators(sizes, "interleave_over", shares, 42) != _library(sizes, "interleave_over", shares, 42)


@pytest.fixture
def entries(tmp_path):
    """Three data sets of 5, 2 and 3 records; the second is drawn 3 times."""
    info = {}
    for name, size in (("a", 5), ("b", 2), ("c", 3)):
        lines = [json.dumps({"instruction": f"{name}{i}", "output": "x"}) for i in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        info[name] = {"file_name": f"{name}.jsonl"}
    info["b"]["num_samples"] = 3
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    return resolve_datasets("a,b,c", tmp_path)


def test_records_know_their_data_set(entries):
    records = list(mixed_records(entries, "interleave_over"))
    assert {(record.data["instruction"][0], record.source) for record in records} == {("a", 0), ("b", 1), ("c", 2)}
    assert [record.data["instruction"] for record in records if record.source != 1] == [
        "a0", "c0", "a1", "c1", "a2", "c2", "a3", "c0", "a4", "c1"
    ]  # fmt: skip
    assert records[0].where.endswith("a.jsonl:1")


def test_num_samples_and_max_samples(entries):
    names = [record.data["instruction"] for record in mixed_records(entries, seed=3)]
    assert names[:5] == ["a0", "a1", "a2", "a3", "a4"] and names[-3:] == ["c0", "c1", "c2"]
    # Three of two: each once, one of them twice, the one that `resample` chooses.
    assert sorted(names[5:-3]) == sorted(f"b{i}" for i in resample(2, 3, 3))
    cut = mixed_records(entries[::2], max_samples=2)
    assert [record.data["instruction"] for record in cut] == ["a0", "a1", "c0", "c1"]


def test_reading_is_lazy(entries, monkeypatch):
    read = []

    def counting(file):
        for record in original(file):
            read.append(record)
            yield record

    original = mixing.read_file
    monkeypatch.setattr(mixing, "read_file", counting)
    taken = list(itertools.islice(mixed_records(entries[::2], "interleave_over"), 2))
    # One ahead in each set.
    assert len(taken) == 2 and len(read) <= 4


@pytest.mark.parametrize(
    ("strategy", "probabilities", "message"),
    [
        ("concat", [0.5, 0.2, 0.3], "--interleave-probs 0.5,0.2,0.3 has no effect with --mix-strategy concat"),
        ("interleave_over", [0.5, 0.5], r"3 data sets need as many numbers \(a, b, c\)"),
        ("interleave_over", [0.5, 0.5, 0.0], "expected numbers above 0 that add up to 1"),
        ("interleave_under", [0.5, 0.5, 0.5], "expected numbers above 0 that add up to 1"),
    ],
)
def test_probabilities_that_do_not_fit(entries, strategy, probabilities, message):
    with pytest.raises(UserError, match=message):
        next(mixed_records(entries, strategy, probabilities))


def test_a_data_set_without_records_is_named(entries):
    entries[2].files[0].write_text("")
    with pytest.raises(UserError, match="data set 'c' holds no records"):
        next(mixed_records(entries, "interleave_under"))


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


def test_an_empty_file_beside_others_is_reported_once(entries, caplog):
    empty = entries[0].files[0].with_name("none.jsonl")
    empty.write_text("")
    mixed = [replace(entries[2], files=[*entries[2].files, empty]), entries[0]]
    assert len(list(mixed_records(mixed, "interleave_over"))) == 10
    assert caplog.text.count(f"data file {empty} holds no records") == 1
