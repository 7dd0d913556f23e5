"""Manager mg from text to micro batches."""

import collections
import logging
import shutil

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedWriter
from tests.fsdp2.data.helpers import build, make_config, write_jsonl
from tests.support.tokenizers import byte_tokenizer

TEXTS = ["short", "谢谢 🙂", "long " * 60, "x", "another document of some length"]
EOD = 257  # of the byte tokenizer: 256 bytes, <s>, </s>


@pytest.fixture
def text(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    return {"dataset": {"file_name": file}, "data_manager_type": "mg", "cutoff_len": 16, "append_eod": True}


def _config(folder, data, **training):
    return make_config(folder, data, **{"stage": "pt", "per_device_train_batch_size": 1, **training})


def _rows(bundle, start=0):
    return [
        (ids, labels, None if batch["position_ids"] is None else batch["position_ids"].tolist()[i])
        for step in bundle.train.micro_batches(start)
        for batch in step
        for i, (ids, labels) in enumerate(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))
    ]


def test_samples_hold_the_documents_tokens(tmp_path, text):
    tokenizer = byte_tokenizer()
    bundle = build(_config(tmp_path, text, num_train_epochs=1), tokenizer)
    rows = _rows(bundle)
    total = sum(len(t.encode()) + 1 for t in TEXTS)
    assert len(rows) == bundle.num_samples == (total - 1) // 16
    assert all(len(ids) == 16 and ids[1:] == labels[:-1] for ids, labels, _ in rows)
    # Long documents are cut, not dropped: all but the unused tail of the concatenation is there.
    documents = collections.Counter(b for t in TEXTS for b in tokenizer.encode(t) + [EOD])
    seen = collections.Counter(token for ids, _, _ in rows for token in ids)
    assert sum((documents - seen).values()) <= 17 and not seen - documents


def test_max_steps_repeats_the_text(tmp_path, text):
    bundle = build(_config(tmp_path, text, max_steps=100), byte_tokenizer())
    rows = _rows(bundle)
    assert len(rows) == 100 == bundle.train.total_steps(3.0, 100)
    assert _rows(bundle, start=90) == rows[90:]


def test_documents_do_not_see_each_other(tmp_path, text):
    plain = _rows(build(_config(tmp_path, text, num_train_epochs=1), byte_tokenizer()))
    text["reset_attention_mask"] = True
    isolated = _rows(build(_config(tmp_path, text, num_train_epochs=1), byte_tokenizer()))
    assert any(EOD in ids[:-1] for ids, _, _ in plain)
    for (ids, labels, _), (same_ids, isolated_labels, positions) in zip(plain, isolated, strict=True):
        assert ids == same_ids
        expected = 0
        for place, token in enumerate(ids):
            assert positions[place] == expected
            assert isolated_labels[place] == (-100 if token == EOD else labels[place])
            expected = 0 if token == EOD else expected + 1


def test_ragged_last_batch(tmp_path, text):
    config = _config(tmp_path, text, num_train_epochs=1, gradient_accumulation_steps=4)
    bundle = build(config, byte_tokenizer(), rank=1, world_size=2)
    count = bundle.num_samples
    assert count % 8
    steps = list(bundle.train.micro_batches())
    assert len(steps) == -(-count // 8) == bundle.train.total_steps(1, -1)
    other = build(config, byte_tokenizer(), rank=0, world_size=2)
    real = sum(batch["num_samples"] for source in (bundle, other) for s in source.train.micro_batches() for batch in s)
    assert real == count


def test_split_gives_evaluation_documents(tmp_path, text):
    text["split"] = "80,20,0"
    tokenizer = byte_tokenizer()
    bundle = build(_config(tmp_path, text, num_train_epochs=1), tokenizer)
    targets = [
        label for batch in bundle.eval.batches() for label in batch["labels"].flatten().tolist() if label != -100
    ]
    assert tokenizer.decode(targets) == TEXTS[4][1:] + "</s>"
    assert tokenizer.encode("🙂")[0] in {token for ids, _, _ in _rows(bundle) for token in ids}


def test_evaluation_files(tmp_path, text):
    text["eval_dataset"] = {"file_name": write_jsonl(tmp_path / "b.jsonl", [{"text": "abcdefghij" * 4}])}
    source = build(_config(tmp_path, text), byte_tokenizer()).eval
    assert source.num_samples == 3  # 40 bytes and the end: 40 targets
    text["eval_max_samples"] = 2
    assert build(_config(tmp_path, text), byte_tokenizer()).eval.num_samples == 2


def _indexed(prefix, value, count, length=50):
    with IndexedWriter(prefix) as writer:
        for _ in range(count):
            writer.add(np.full(length, value))
    return str(prefix)


def test_indexed_files_and_weights(tmp_path, text):
    one, two = _indexed(tmp_path / "one_text_document", 1, 10), _indexed(tmp_path / "two_text_document", 2, 30)

    def shares(file_name):
        data = {**text, "dataset": {"file_name": file_name}}
        rows = _rows(build(_config(tmp_path, data, max_steps=200), byte_tokenizer()))
        return sum(ids[0] == 1 for ids, _, _ in rows) / len(rows)

    assert shares(one) == shares(f"{one}.bin") == 1.0
    assert shares([0.9, one, 0.1, two]) == 0.9
    assert shares([one, two]) == shares(f"{one},{two}") == 0.25  # by number of tokens
    assert shares([0.001, one, 0.999, two]) == 0.005  # the rule takes the first data set at once


def test_the_index_lies_beside_the_data_or_in_the_output(tmp_path, text):
    one = _indexed(tmp_path / "data" / "one_text_document", 1, 10)
    two = _indexed(tmp_path / "data" / "two_text_document", 2, 30)
    text["dataset"] = {"file_name": [one, two]}
    rows = _rows(build(_config(tmp_path, text, max_steps=20), byte_tokenizer()))
    beside = tmp_path / "data" / "cache"
    assert len(list(beside.glob("*.json"))) == 3 and not (tmp_path / "output").exists()
    # Another run, of another output, takes it up.
    stamps = {file: file.stat().st_mtime_ns for file in beside.iterdir()}
    assert _rows(build(_config(tmp_path / "other", text, max_steps=20), byte_tokenizer())) == rows
    assert {file: file.stat().st_mtime_ns for file in beside.iterdir()} == stamps
    # Data that cannot be written to.
    shutil.rmtree(beside)
    beside.write_text("in the way")
    assert _rows(build(_config(tmp_path, text, max_steps=20), byte_tokenizer())) == rows
    assert len(list((tmp_path / "output" / "dataset_cache").glob("*.json"))) == 3


def test_files_of_weight_zero_are_left_out(tmp_path, text):
    one, two = _indexed(tmp_path / "one", 1, 10), _indexed(tmp_path / "two", 2, 30)
    text["dataset"] = {"file_name": [0, one, 0.5, two]}
    bundle = build(_config(tmp_path, text, num_train_epochs=1), byte_tokenizer())
    assert {ids[0] for ids, _, _ in _rows(bundle)} == {2} and bundle.num_samples == (30 * 50 - 1) // 16


def test_several_text_files_are_one(tmp_path, text):
    other = write_jsonl(tmp_path / "b.jsonl", [{"text": "z" * 200}])
    text["dataset"]["file_name"] = [text["dataset"]["file_name"], other]
    rows = _rows(build(_config(tmp_path, text, num_train_epochs=1), byte_tokenizer()))
    total = sum(len(t.encode()) + 1 for t in TEXTS) + 201
    assert len(rows) == (total - 1) // 16


def test_cache_follows_the_content(tmp_path, text, caplog):
    caplog.set_level(logging.INFO, "mindspeed_llm")
    config = _config(tmp_path, text, max_steps=20)
    rows = _rows(build(config, byte_tokenizer()))
    caplog.clear()
    assert _rows(build(config, byte_tokenizer())) == rows
    assert "tokenized" not in caplog.text
    write_jsonl(tmp_path / "a.jsonl", [{"text": t.upper()} for t in TEXTS])
    assert _rows(build(config, byte_tokenizer())) != rows
    assert _rows(build(_config(tmp_path, text, max_steps=20, seed=1), byte_tokenizer())) != rows


def test_max_samples_takes_the_first_documents(tmp_path, text):
    text |= {"max_samples": 1, "cutoff_len": 4}
    rows = _rows(build(_config(tmp_path, text, max_steps=3), byte_tokenizer()))
    assert {token for ids, _, _ in rows for token in ids} == {*byte_tokenizer().encode("short"), EOD}


def test_mistakes(tmp_path, text):
    with pytest.raises(UserError, match=r"has 353 tokens, which is 0 samples of data\.cutoff_len 4096"):
        build(_config(tmp_path, {**text, "cutoff_len": 4096}), byte_tokenizer())
    with pytest.raises(
        UserError, match=r"353 tokens.* takes cutoff_len \+ 1 = 4097 tokens and would hold the text several"
    ):
        build(_config(tmp_path, {**text, "cutoff_len": 4096}, max_steps=5), byte_tokenizer())
    with pytest.raises(UserError, match=r"training\.num_train_epochs 0\.01 of the 22 samples"):
        build(_config(tmp_path, text, num_train_epochs=0.01), byte_tokenizer())
    with pytest.raises(UserError, match=r"one\.bin exists, but .*one\.idx does not"):
        (tmp_path / "one.bin").write_bytes(b"")
        build(_config(tmp_path, {**text, "dataset": {"file_name": str(tmp_path / "one")}}), byte_tokenizer())
    with pytest.raises(UserError, match="has a weight, but no"):
        build(
            _config(tmp_path, {**text, "dataset": {"file_name": [1, text["dataset"]["file_name"]]}}), byte_tokenizer()
        )
    with pytest.raises(UserError, match=r"^data\.eval_dataset\.file_name: .*one\.bin exists"):
        build(_config(tmp_path, {**text, "eval_dataset": {"file_name": str(tmp_path / "one")}}), byte_tokenizer())
    with pytest.raises(UserError, match="keeps samples of data_manager_type lf"):
        build(_config(tmp_path, {**text, "tokenized_path": "x"}), byte_tokenizer())
    with pytest.raises(UserError, match="stage pt only"):
        build(make_config(tmp_path, text, stage="sft"), byte_tokenizer())


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (
            "98,2,0",
            r"data\.split '98,2,0' leaves no document for evaluation: 2 / 100 of 5 documents is 0\.1, .*0; raise",
        ),
        ("1,98,1", r"leaves no document for training: 1 / 100 of 5 documents is 0\.05"),
    ],
)
def test_a_wanted_part_without_documents(tmp_path, text, split, message):
    with pytest.raises(UserError, match=message):
        build(_config(tmp_path, {**text, "split": split}), byte_tokenizer())
    # Evaluation data of its own needs no part of the split.
    if split == "98,2,0":
        data = {**text, "split": split, "eval_dataset": text["dataset"]}
        assert build(_config(tmp_path, data), byte_tokenizer()).eval.num_samples


def test_a_blended_data_set_that_is_shorter_than_a_sample(tmp_path, text):
    names = [0.5, _indexed(tmp_path / "one", 1, 1, length=16), 0.5, _indexed(tmp_path / "two", 2, 10)]
    data = {**text, "dataset": {"file_name": names}}
    with pytest.raises(UserError, match=r"data\.dataset: .*one has 16 tokens to train on, but a sample .* takes 17"):
        build(_config(tmp_path, data, max_steps=5), byte_tokenizer())


def test_text_without_a_target_is_refused(tmp_path, text):
    only_ends = _indexed(tmp_path / "ends", EOD, 4, length=20)
    isolated = {**text, "reset_attention_mask": True}
    with pytest.raises(UserError, match=r"no token of the evaluation data has a target.*data\.eval_dataset"):
        build(_config(tmp_path, {**isolated, "eval_dataset": {"file_name": only_ends}}), byte_tokenizer())
    with pytest.raises(UserError, match=r"no token of the training data has a target.*data\.dataset"):
        build(_config(tmp_path, {**isolated, "dataset": {"file_name": only_ends}}), byte_tokenizer())


def test_nothing_to_evaluate_on_is_said_of_the_evaluation(tmp_path, text):
    text["eval_dataset"] = {"file_name": write_jsonl(tmp_path / "b.jsonl", [{"text": " "}])}
    with pytest.raises(UserError, match=r"^data\.eval_dataset: no sample to evaluate on is left of 1 records"):
        build(_config(tmp_path, text), byte_tokenizer())
