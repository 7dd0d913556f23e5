"""Counting what became of records."""

import itertools

import numpy as np

from mindspeed_llm.tasks.preprocess.chunks import Chunk, Summary, histogram, token_keys


def _chunk(lengths: list[int], *, skipped: list[tuple[str, str]], keys: tuple[str, ...]) -> Chunk:
    arrays = {key: np.zeros(sum(lengths), np.int32) for key in keys}
    counts = dict.fromkeys(keys, np.array(lengths, np.int32))
    return Chunk(arrays, counts, len(lengths) + len(skipped), skipped, empty_replies=1, num_targets=2)


def test_histogram_by_hand() -> None:
    lengths = [0, 1, 2, 3, 4, 5, 8, 9, 1 << 20, (1 << 20) + 1, 0]
    assert histogram(np.array(lengths)) == {
        "0": 2, "1": 1, "2": 1, "3-4": 2, "5-8": 2, "9-16": 1, "524289-1048576": 1, "1048577-2097152": 1,
    }  # fmt: skip
    for name, count in histogram(np.arange(1, 5000)).items():
        low, high = int(name.partition("-")[0]), int(name.rpartition("-")[2])
        assert count == min(high, 4999) - low + 1


def test_only_token_ids_are_counted() -> None:
    assert token_keys(("input_ids", "attention_mask", "labels")) == ["input_ids"]
    pair = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
    assert token_keys(pair) == ["chosen_input_ids", "rejected_input_ids"]
    assert token_keys(("labels",)) == ["labels"]
    summary = Summary()
    summary.add(_chunk([3, 5], skipped=[], keys=pair))
    assert (summary.num_samples, summary.num_tokens) == (2, 16)
    assert summary.length_histogram == {"3-4": 2, "5-8": 2}


def test_summaries_of_parts_add_up() -> None:
    chunks = [
        _chunk([1 + number, 40], skipped=[("empty", f"f:{number}"), ("odd", f"g:{number}")][: number % 3], keys=("a",))
        for number in range(9)
    ]
    whole = Summary()
    for chunk in chunks:
        whole.add(chunk)
    assert whole.first_skipped == {"empty": ["f:1", "f:2", "f:4"], "odd": ["g:2", "g:5", "g:8"]}
    assert whole.skipped == {"empty": 6, "odd": 3} and whole.num_records == 27
    for first, second in itertools.combinations(range(10), 2):
        joined = Summary()
        for part in (chunks[:first], chunks[first:second], chunks[second:]):
            summary = Summary()
            for chunk in part:
                summary.add(chunk)
            joined.add_summary(summary)
        assert joined == whole
