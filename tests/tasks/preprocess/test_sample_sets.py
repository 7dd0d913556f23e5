"""Sets of instruction samples and pairs: what is read, and what is refused."""

import re

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import sample_sets
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedWriter
from mindspeed_llm.tasks.preprocess.sample_sets import SampleSet, segment_lengths
from mindspeed_llm.tasks.preprocess.sample_store import key_prefix

INSTRUCTION = {
    "input_ids": [[5, 6, 7, 8], [5, 9]],
    "attention_mask": [[1, 1, 2, 2], [1, 0]],
    "labels": [[-100, 6, -100, 8], [-100, 9]],
}
PAIRS = {
    "chosen_input_ids": [[1, 2], [3]],
    "chosen_labels": [[-100, 2], [3]],
    "rejected_input_ids": [[1, 4, 5], [6]],
    "rejected_labels": [[-100, 4, 5], [-100]],
}


def _write(prefix, columns, dtype=np.int32):
    for key, rows in columns.items():
        with IndexedWriter(key_prefix(prefix, key), dtype) as writer:
            writer.add_many(np.array([number for row in rows for number in row]), [len(row) for row in rows])
    return prefix


@pytest.mark.parametrize(("kind", "columns"), [("instruction", INSTRUCTION), ("pairwise", PAIRS)])
def test_samples(tmp_path, kind, columns):
    samples = SampleSet(_write(tmp_path / "a", columns), kind)
    samples.check(10)
    assert len(samples) == 2
    for index in range(2):
        row = samples[index]
        assert {key: numbers.tolist() for key, numbers in row.items()} == {
            key: rows[index] for key, rows in columns.items()
        }
        assert {numbers.dtype for numbers in row.values()} == {np.dtype(np.int64)}
    assert samples.lengths.tolist() == ([4, 2] if kind == "instruction" else [3, 1])


def test_masks_are_optional_and_further_keys_are_read(tmp_path):
    columns = {key: rows for key, rows in INSTRUCTION.items() if key != "attention_mask"} | {"rewards": [[1], []]}
    _write(tmp_path / "a", columns)
    assert sorted(SampleSet(tmp_path / "a", "instruction")[0]) == ["input_ids", "labels"]
    row = SampleSet(tmp_path / "a", "instruction", additional_keys=["rewards"])[0]
    assert row["rewards"].tolist() == [1]
    masks = {"chosen_attention_mask": [[1, 1], [1]], "rejected_attention_mask": [[1, 1, 1], [1]]}
    assert "rejected_attention_mask" in SampleSet(_write(tmp_path / "b", PAIRS | masks), "pairwise")[0]
    # Prompts: further keys are as long as they like.
    prompts = {"input_ids": [[1, 2]], "attention_mask": [[1, 1]], "labels": [[7, 8, 9]]}
    samples = SampleSet(_write(tmp_path / "c", prompts), "prompt", additional_keys=["labels"])
    samples.check()
    assert samples[0]["labels"].tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "pairs",
            "instruction",
            "{}/pairs is no instruction data: {}/pairs_packed_input_ids_document.idx and .bin do not both exist; "
            "there is data of kind pairwise",
        ),
        ("alpaca", "pairwise", "there is data of kind instruction"),
        ("prompts", "instruction", "there is data of kind prompt"),
        ("wiki", "instruction", "there is data of kind pretrain"),
        ("wiki_text_document", "instruction", "there is data of kind pretrain"),
        ("alpaca_packed_input_ids_document", "instruction", "one file of a data set; give its prefix, {}/alpaca"),
        ("alpaca_packed_labels_document.bin", "instruction", "give its prefix, {}/alpaca"),
        ("raw.jsonl", "instruction", "this is a file of records; preprocess it first"),
        ("alpcaa", "instruction", "did you mean {}/alpaca?"),
        ("nothing", "instruction", "{} has no data of this name"),
    ],
)
def test_data_of_another_kind(tmp_path, name, kind, message):
    _write(tmp_path / "pairs", PAIRS)
    _write(tmp_path / "alpaca", INSTRUCTION)
    _write(tmp_path / "prompts", {"input_ids": [[1]], "attention_mask": [[1]]})
    _write(tmp_path / "wiki", {"text": [[1]]})
    (tmp_path / "raw.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=re.escape(message.replace("{}", str(tmp_path)))):
        SampleSet(tmp_path / name, kind)


@pytest.mark.parametrize(
    ("key", "rows", "message"),
    [
        ("labels", [[-100, 6, -100, 8]], "the numbers of samples differ: input_ids 2, labels 1, attention_mask 2"),
        ("labels", [[-100, 6, -100, 8], [9]], "sample 1 has 2 input_ids, but 1 labels"),
        ("attention_mask", [[1, 1, 2], [1, 0]], "sample 0 has 4 input_ids, but 3 attention_mask"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path, key, rows, message):
    _write(tmp_path / "a", INSTRUCTION | {key: rows})
    with pytest.raises(UserError, match=message):
        SampleSet(tmp_path / "a", "instruction")


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize(
    ("key", "rows", "message"),
    [
        ("labels", [[-100, 6, -99, 8], [-100, 9]], r"labels of sample 0 holds -99; .* vocabulary's size 10, or -100"),
        ("labels", [[-100, 6, -100, 8], [-100, 10]], "labels of sample 1 holds 10"),
        ("input_ids", [[5, 6, 7, 8], [10, 9]], "input_ids of sample 1 holds 10; expected numbers from 0 on and below"),
        ("input_ids", [[5, -100, 7, 8], [5, 9]], "input_ids of sample 0 holds -100"),
        ("attention_mask", [[1, 1, 2, 2], [1, -1]], "attention_mask of sample 1 holds -1; expected numbers from 0 on;"),
        ("labels", [[-100] * 4, [-100] * 2], "no token of labels is a target"),
    ],
)
def test_numbers_out_of_range(tmp_path, monkeypatch, block, key, rows, message):
    monkeypatch.setattr(sample_sets, "_BLOCK", block)
    samples = SampleSet(_write(tmp_path / "a", INSTRUCTION | {key: rows}), "instruction")
    with pytest.raises(UserError, match=message):
        samples.check(10)


def test_segments():
    for mask, lengths in (
        ([1, 1, 1], [3]),
        ([1, 1, 2, 3, 3, 0, 0], [2, 1, 2]),
        ([1], [1]),
        ([0, 0], []),
        ([], []),
    ):
        assert segment_lengths(np.array(mask, dtype=np.int64)).tolist() == lengths
    for mask in ([2, 2], [1, 3], [1, 0, 1], [1, 2, 1], [0, 1]):
        with pytest.raises(UserError, match="neither of ones nor of segments"):
            segment_lengths(np.array(mask))
