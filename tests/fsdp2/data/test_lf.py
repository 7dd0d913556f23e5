"""Manager lf from records to micro batches."""

import collections
import itertools
import json
import logging

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.samples import NO_ROOM
from tests.fsdp2.data.helpers import build, make_config, rows_of, write_jsonl
from tests.support.tokenizers import byte_tokenizer, chatml_tokenizer

RECORDS = [{"instruction": f"question {i} " + "x" * (i % 5), "output": f"answer {i}"} for i in range(21)]


@pytest.fixture
def alpaca(tmp_path):
    return {"dataset": {"file_name": write_jsonl(tmp_path / "a.jsonl", RECORDS)}, "template": "default"}


def _texts(bundle, tokenizer):
    rows = [row for step in bundle.train.micro_batches() for batch in step for row in rows_of(batch)]
    return [tokenizer.decode(ids) for ids, _ in rows]


def _eval_texts(source, tokenizer):
    return [tokenizer.decode(ids) for batch in source.batches() for ids, _ in rows_of(batch)]


def _full(record):
    return f"Human: {record['instruction']}\nAssistant:{record['output']}</s>"


def test_every_record_once_per_epoch_with_loss_on_its_answer(tmp_path, alpaca):
    tokenizer = byte_tokenizer()
    bundle = build(make_config(tmp_path, alpaca, num_train_epochs=2), tokenizer)
    texts = _texts(bundle, tokenizer)
    assert collections.Counter(texts) == collections.Counter({_full(record): 2 for record in RECORDS})
    assert texts[:21] != texts[21:]
    for step in bundle.train.micro_batches():
        for ids, labels in (row for batch in step for row in rows_of(batch)):
            # Shifted: the target of position t is token t + 1; targets are exactly the answer and its end.
            targets = [label for label in labels if label != -100]
            assert targets == ids[-len(targets) :]
            assert tokenizer.decode(targets) == tokenizer.decode(ids).split("\nAssistant:")[1]


def test_unshuffled_order_is_the_file(tmp_path, alpaca):
    tokenizer = byte_tokenizer()
    config = make_config(tmp_path, alpaca, num_train_epochs=1, disable_shuffling=True)
    assert _texts(build(config, tokenizer), tokenizer) == [_full(record) for record in RECORDS]


def test_template_null_is_the_tokenizers_own_else_an_error(tmp_path, alpaca):
    alpaca["template"] = None
    tokenizer = chatml_tokenizer()
    config = make_config(tmp_path, alpaca, num_train_epochs=1, disable_shuffling=True)
    expected = "<|im_start|>user\nquestion 0 <|im_end|>\n<|im_start|>assistant\nanswer 0<|im_end|>\n"
    assert _texts(build(config, tokenizer), tokenizer)[0] == expected
    with pytest.raises(UserError, match=r"data\.template is not set.* no chat template.*chatml, .*qwen3.*empty puts"):
        build(config, byte_tokenizer())
    tokenizer, alpaca["template"] = byte_tokenizer(), "empty"
    config = make_config(tmp_path, alpaca, num_train_epochs=1, disable_shuffling=True)
    assert _texts(build(config, tokenizer), tokenizer)[0] == "question 0 answer 0"


def test_template_with_an_end_marker_makes_it_the_eos(tmp_path, alpaca):
    tokenizer = chatml_tokenizer()
    build(make_config(tmp_path, {**alpaca, "template": "qwen3"}), tokenizer)
    assert tokenizer.eos_token == "<|im_end|>"


def test_packed_rows_hold_every_sample_once(tmp_path, alpaca):
    tokenizer = byte_tokenizer()
    data = {**alpaca, "cutoff_len": 100, "packing": True}
    config = make_config(tmp_path, data, num_train_epochs=1)
    bundle = build(config, tokenizer)
    batches = [batch for step in bundle.train.micro_batches() for batch in step]
    assert all(batch["input_ids"].shape[1] == 100 and batch["position_ids"] is None for batch in batches)
    joined = "".join(_texts(bundle, tokenizer))
    assert all(joined.count(_full(record)) == 1 for record in RECORDS)
    assert sum(batch["num_tokens"] for batch in batches) == sum(len(_full(r)) - 3 for r in RECORDS)


def test_neatly_packed_segments_are_the_samples_alone(tmp_path, alpaca):
    tokenizer = byte_tokenizer()
    alone = build(make_config(tmp_path, alpaca, num_train_epochs=1), tokenizer)
    expected = sorted(row for step in alone.train.micro_batches() for batch in step for row in rows_of(batch))
    data = {**alpaca, "cutoff_len": 100, "neat_packing": True}
    packed = build(make_config(tmp_path, data, num_train_epochs=1), tokenizer)
    segments = []
    for batch in (batch for step in packed.train.micro_batches() for batch in step):
        assert batch["attention_mask"] is None
        for ids, labels, positions in zip(
            batch["input_ids"].tolist(), batch["labels"].tolist(), batch["position_ids"].tolist(), strict=True
        ):
            starts = [i for i, position in enumerate(positions) if position == 0] + [len(ids)]
            for start, end in itertools.pairwise(starts):
                assert positions[start:end] == list(range(end - start))
                assert labels[end - 1] == -100
                if any(label != -100 for label in labels[start:end]):
                    segments.append((ids[start:end], labels[start:end]))
    assert sorted(segments) == expected


def test_pretraining_pieces(tmp_path):
    texts = ["a" * 250, "b" * 7]
    data = {"dataset": {"file_name": write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts])}}
    data |= {"cutoff_len": 100, "append_eod": True}
    tokenizer = byte_tokenizer()
    config = make_config(tmp_path, data, stage="pt", num_train_epochs=1, disable_shuffling=True)
    assert _texts(build(config, tokenizer), tokenizer) == ["a" * 100, "a" * 100, "a" * 50 + "</s>", "b" * 7 + "</s>"]


@pytest.mark.parametrize(("size", "count"), [(0.2, 4), (5, 5)])
def test_val_size_splits_without_overlap(tmp_path, alpaca, size, count):
    tokenizer = byte_tokenizer()
    bundle = build(make_config(tmp_path, {**alpaca, "val_size": size}, num_train_epochs=1), tokenizer)
    train, held_out = _texts(bundle, tokenizer), _eval_texts(bundle.eval, tokenizer)
    assert len(held_out) == count and not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(map(_full, RECORDS))


def test_repeated_samples_are_held_out_altogether(tmp_path, alpaca):
    alpaca["dataset"]["num_samples"] = 50
    tokenizer = byte_tokenizer()
    bundle = build(make_config(tmp_path, {**alpaca, "val_size": 4}, num_train_epochs=1), tokenizer)
    train, held_out = _texts(bundle, tokenizer), _eval_texts(bundle.eval, tokenizer)
    assert len(set(held_out)) == len(held_out) == 4 and not set(train) & set(held_out)
    assert 38 <= len(train) <= 46


@pytest.fixture
def registered(tmp_path):
    info = {}
    for name, count in (("ten", 10), ("four", 4)):
        rows = [{"instruction": f"{name} {i}", "output": "a"} for i in range(count)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
        info[name] = {"file_name": f"{name}.jsonl"}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    return {"template": "empty"}


@pytest.mark.parametrize(
    ("strategy", "probabilities", "counts"),
    [
        ("concat", None, {"ten": 10, "four": 4}),
        ("interleave_under", None, {"ten": 4, "four": 4}),
        ("interleave_over", None, {"ten": 10, "four": 10}),
    ],
)
@pytest.mark.parametrize("names", ["ten,four", ["ten", "four"]])
def test_mixing(tmp_path, registered, strategy, probabilities, counts, names):
    tokenizer = byte_tokenizer()
    data = {**registered, "dataset": names, "mix_strategy": strategy, "interleave_probs": probabilities}
    texts = _texts(build(make_config(tmp_path, data, num_train_epochs=1), tokenizer), tokenizer)
    assert collections.Counter(text.split()[0] for text in texts) == counts


def test_mixing_with_probabilities(tmp_path, registered):
    tokenizer = byte_tokenizer()
    data = {**registered, "dataset": "ten,four", "mix_strategy": "interleave_over", "interleave_probs": "0.9,0.1"}
    texts = _texts(build(make_config(tmp_path, data, num_train_epochs=1), tokenizer), tokenizer)
    counts = collections.Counter(text.split()[0] for text in texts)
    assert counts["four"] >= 4 and counts["ten"] > 3 * counts["four"]


def test_evaluation_data_sets_of_their_own(tmp_path, registered, alpaca):
    tokenizer = byte_tokenizer()
    data = {**registered, **alpaca, "template": "empty", "eval_dataset": "ten,four"}
    bundle = build(make_config(tmp_path, data), tokenizer)
    assert len(_eval_texts(bundle.eval, tokenizer)) == 14 and bundle.num_samples == 21
    bundle = build(make_config(tmp_path, {**data, "eval_on_each_dataset": True, "eval_max_samples": 6}), tokenizer)
    assert {name: len(_eval_texts(source, tokenizer)) for name, source in bundle.eval.items()} == {"ten": 6, "four": 4}


def test_max_samples(tmp_path, registered):
    data = {**registered, "dataset": "ten,four", "max_samples": 5}
    assert build(make_config(tmp_path, data), byte_tokenizer()).num_samples == 9


def test_cache_is_used_again_and_never_stale(tmp_path, alpaca, caplog):
    tokenizer, config = byte_tokenizer(), make_config(tmp_path, alpaca, num_train_epochs=1)
    caplog.set_level(logging.INFO, "mindspeed_llm")
    first = _texts(build(config, tokenizer), tokenizer)
    assert "tokenized" in caplog.text
    caplog.clear()
    assert _texts(build(config, tokenizer), tokenizer) == first
    assert "tokenized" not in caplog.text and "21 records, 21 samples" in caplog.text
    # Same size, other content.
    write_jsonl(tmp_path / "a.jsonl", [{**record, "output": record["output"].upper()} for record in RECORDS])
    assert all("ANSWER" in text for text in _texts(build(config, tokenizer), tokenizer))
    for change in ({"template": "empty"}, {"cutoff_len": 60}, {"default_system": "S"}):
        caplog.clear()
        build(make_config(tmp_path, {**alpaca, **change}), tokenizer)
        assert "tokenized" in caplog.text, change
    caplog.clear()
    build(make_config(tmp_path, {**alpaca, "overwrite_cache": True}), tokenizer)
    assert "tokenized" in caplog.text


def test_skipped_records_are_reported(tmp_path, caplog):
    rows = [*RECORDS, {"instruction": "x" * 300, "output": "a"}, {"instruction": "", "output": "a"}]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    data = {"dataset": {"file_name": file}, "template": "default", "cutoff_len": 100}
    bundle = build(make_config(tmp_path, data), byte_tokenizer())
    assert bundle.num_samples == 21
    assert f"1 records skipped: {NO_ROOM} (first at {file}:22)" in caplog.text
    assert f"1 records skipped: empty prompt (first at {file}:23)" in caplog.text


def test_nothing_left_is_an_error(tmp_path, alpaca):
    with pytest.raises(
        UserError, match=r"^data\.dataset: no sample to train on is left of 21 records: .*fills cutoff_len"
    ):
        build(make_config(tmp_path, {**alpaca, "cutoff_len": 10}), byte_tokenizer())
    with pytest.raises(UserError, match=r"data\.val_size 21 holds out 21 of 21 samples"):
        build(make_config(tmp_path, {**alpaca, "val_size": 21}), byte_tokenizer())
    short = {"file_name": write_jsonl(tmp_path / "b.jsonl", [{"instruction": "x" * 300, "output": "a"}])}
    with pytest.raises(UserError, match=r"^data\.eval_dataset: no sample to evaluate on is left of 1 records: .*fills"):
        build(make_config(tmp_path, {**alpaca, "eval_dataset": short, "cutoff_len": 100}), byte_tokenizer())
    write_jsonl(tmp_path / "b.jsonl", [{"text": "a"}] * 3)
    with pytest.raises(UserError, match=r"^data\.dataset: no sample to train on is left of 3 records: .*one token"):
        build(make_config(tmp_path, {"dataset": short}, stage="pt"), byte_tokenizer())
    write_jsonl(tmp_path / "a.jsonl", [])
    with pytest.raises(UserError, match=r"^data\.dataset: data file .*a\.jsonl holds no records"):
        build(make_config(tmp_path, alpaca), byte_tokenizer())


@pytest.mark.parametrize("field", ["dataset", "eval_dataset"])
def test_errors_in_records_name_the_field(tmp_path, alpaca, field, monkeypatch):
    # A file whose name begins as a field does.
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "data.jsonl", [*RECORDS, {"instruction": "q", "output": 3}])
    data = {**alpaca, "dataset_dir": "none", field: {"file_name": "data.jsonl"}}
    with pytest.raises(UserError, match=rf"^data\.{field}: data\.jsonl:22: key 'output': expected text"):
        build(make_config(tmp_path, data), byte_tokenizer())
    with pytest.raises(UserError, match=rf"^data\.{field}: 'x' is not in|^data\.{field} names 'x'"):
        build(make_config(tmp_path, {**data, field: "x"}), byte_tokenizer())


def test_a_last_batch_that_is_never_filled(tmp_path, alpaca):
    def steps(epochs):
        options = {"per_device_train_batch_size": 32, "dataloader_drop_last": True, "num_train_epochs": epochs}
        return sum(1 for _ in build(make_config(tmp_path, alpaca, **options), byte_tokenizer()).train.micro_batches())

    # 21 samples an epoch: batches run across the ends of epochs, and only the rest of the whole run is left out.
    assert [steps(2), steps(3), steps(32 / 21)] == [1, 1, 1] and steps(64 / 21) == 2
    with pytest.raises(UserError, match=r"21 samples .*make no step of global batch size 32 with .*drop_last"):
        steps(1)


def test_tokenized_path(tmp_path, alpaca):
    tokenizer, path = byte_tokenizer(), tmp_path / "kept"
    data = {**alpaca, "val_size": 4, "tokenized_path": str(path)}
    config = make_config(tmp_path, data, num_train_epochs=1)
    bundle = build(config, tokenizer)
    train, held_out = _texts(bundle, tokenizer), _eval_texts(bundle.eval, tokenizer)
    # Read back without the records.
    (tmp_path / "a.jsonl").unlink()
    data |= {"dataset": None}
    other = make_config(tmp_path, data, num_train_epochs=1)
    bundle = build(other, tokenizer)
    assert (_texts(bundle, tokenizer), _eval_texts(bundle.eval, tokenizer)) == (train, held_out)
    (path / "tokenized_info.json").unlink()
    for file in path.glob("train_packed_*"):
        file.unlink()
    with pytest.raises(UserError, match="exists, but holds no tokenized data"):
        build(other, tokenizer)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder with tokenized data, and the settings that made it."""
    folder = tmp_path_factory.mktemp("kept")
    data = {"dataset": {"file_name": write_jsonl(folder / "a.jsonl", RECORDS)}, "template": "default", "val_size": 4}
    data |= {"tokenized_path": str(folder / "tokens")}
    build(make_config(folder, data), byte_tokenizer())
    return folder, data


@pytest.mark.parametrize(
    ("changes", "training", "expected"),
    [
        ({"cutoff_len": 64}, {}, r"data\.cutoff_len \(there 2048, now 64\)\. Set"),
        ({"template": "empty"}, {}, r'data\.template \(there "default", now "empty"\), content of the template'),
        ({"train_on_prompt": True}, {}, r"data\.train_on_prompt \(there false, now true\)"),
        ({"mask_history": True}, {}, r"data\.mask_history"),
        ({"enable_thinking": None}, {}, r"data\.enable_thinking \(there true, now null\)"),
        ({"tool_format": "qwen"}, {}, r"data\.tool_format"),
        ({"default_system": "S"}, {}, r"data\.default_system"),
        ({"max_samples": 5}, {}, r"data\.max_samples \(there null, now 5\)"),
        ({"val_size": 0.0}, {}, r"data\.val_size .*training\.seed \(there 42, now null\)"),
        ({"cutoff_len": 64, "max_samples": 5}, {}, r"data\.cutoff_len .*, data\.max_samples"),
        ({}, {"seed": 1}, r"training\.seed \(there 42, now 1\)"),
        ({}, {"stage": "pt"}, r'training\.stage \(there "sft", now "pt"\)'),
    ],
)
def test_tokenized_path_refuses_other_settings(kept, changes, training, expected):
    folder, data = kept
    with pytest.raises(UserError, match=r"data\.tokenized_path .* made with other settings: .*" + expected):
        build(make_config(folder, {**data, **changes}, **training), byte_tokenizer())


def test_tokenized_path_and_its_tokenizer_and_origin(kept, tmp_path):
    folder, data = kept
    with pytest.raises(UserError, match=r"other settings: tokenizer \(there"):
        build(make_config(folder, data), byte_tokenizer(["<new>"]))
    # Where the records lie does not matter.
    assert build(make_config(folder, {**data, "dataset": {"file_name": "gone.jsonl"}}), byte_tokenizer()).num_samples
    info = folder / "tokens" / "tokenized_info.json"
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / info.name).write_text(json.dumps({"train": "train", "eval": {}}))
    with pytest.raises(UserError, match="does not say which settings made its data"):
        build(make_config(folder, {**data, "tokenized_path": str(tmp_path / "old")}), byte_tokenizer())
    with pytest.raises(UserError, match=r"data\.dataset is not set, and data\.tokenized_path .* holds no data yet"):
        data = {**data, "dataset": None, "tokenized_path": str(tmp_path / "new")}
        build(make_config(folder, data), byte_tokenizer())


def test_options_that_disagree(tmp_path, alpaca):
    with pytest.raises(UserError, match=r"needs data\.template"):
        build(make_config(tmp_path, {**alpaca, "template": None, "tool_format": "qwen"}), chatml_tokenizer())
    with pytest.raises(UserError, match="train_on_prompt is true, but template 'glm4' closes replies by the label"):
        build(make_config(tmp_path, {**alpaca, "template": "glm4", "train_on_prompt": True}), byte_tokenizer())
    tokenizer = byte_tokenizer(chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="the tokenizer's chat template closes replies by the label"):
        build(make_config(tmp_path, {**alpaca, "template": None, "train_on_prompt": True}), tokenizer)


def test_gpt_is_the_format_of_gpt_oss(tmp_path, alpaca):
    tokenizer = byte_tokenizer(["<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|return|>"])
    config = make_config(tmp_path, {**alpaca, "template": "gpt"}, num_train_epochs=1, disable_shuffling=True)
    text = _texts(build(config, tokenizer), tokenizer)[0]
    assert text.startswith("<|start|>system<|message|>You are ChatGPT, ")
    assert text.endswith(
        "<|end|><|start|>user<|message|>question 0 <|end|>"
        "<|start|>assistant<|channel|>final<|message|>answer 0<|return|>"
    )


def test_workers_and_splits_change_nothing(tmp_path, alpaca):
    tokenizer = byte_tokenizer()
    base = build(make_config(tmp_path / "0", {**alpaca, "dataset_dir": str(tmp_path)}, num_train_epochs=1), tokenizer)
    data = {**alpaca, "preprocessing_num_workers": 2, "preprocessing_batch_size": 4}
    config = make_config(tmp_path, data, num_train_epochs=1, dataloader_num_workers=2, dataloader_prefetch_factor=2)
    assert _texts(build(config, tokenizer), tokenizer) == _texts(base, tokenizer)


def test_lengths_are_padded_to_eight(tmp_path, alpaca):
    bundle = build(make_config(tmp_path, alpaca, num_train_epochs=1), byte_tokenizer())
    widths = {batch["input_ids"].shape[1] for step in bundle.train.micro_batches() for batch in step}
    longest = max(len(_full(record)) - 3 for record in RECORDS)
    assert all(width % 8 == 0 for width in widths) and max(widths) == int(np.ceil(longest / 8)) * 8
