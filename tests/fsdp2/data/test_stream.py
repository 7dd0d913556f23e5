"""Streaming: truly lazy, the same global batches however they are split."""

import collections
import itertools
import json

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.data import stream as stream_module
from tests.fsdp2.data.helpers import build, make_config, rows_of, write_jsonl
from tests.support.tokenizers import byte_tokenizer


@pytest.fixture
def data(tmp_path):
    rows = [{"instruction": f"{i}|", "output": "a"} for i in range(20)]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    return {"dataset": {"file_name": file}, "template": "empty", "streaming": True, "buffer_size": 8}


def _number(ids):
    return int(byte_tokenizer().decode(ids).split("|")[0])


def _steps(config, *, rank=0, world_size=1, start=0):
    bundle = build(config, byte_tokenizer(), rank=rank, world_size=world_size)
    return [
        [[_number(ids) for ids, _ in rows_of(batch)] for batch in step] for step in bundle.train.micro_batches(start)
    ]


def _config(folder, data, rows=8, accumulation=1, steps=5, **training):
    return make_config(
        folder,
        data,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        **training,
    )


@pytest.mark.parametrize(("ranks", "rows", "accumulation"), [(1, 2, 4), (2, 2, 2), (4, 1, 2)])
def test_global_batches_do_not_depend_on_the_split(tmp_path, data, ranks, rows, accumulation):
    expected = [step[0] for step in _steps(_config(tmp_path, data))]
    config = _config(tmp_path, data, rows, accumulation)
    per_rank = [_steps(config, rank=rank, world_size=ranks) for rank in range(ranks)]
    split = [
        [number for micro in zip(*step, strict=True) for rank in micro for number in rank]
        for step in zip(*per_rank, strict=True)
    ]
    assert split == expected


def test_every_record_once_per_pass_and_shuffled(tmp_path, data):
    numbers = list(itertools.chain.from_iterable(step[0] for step in _steps(_config(tmp_path, data))))
    assert sorted(numbers[:20]) == sorted(numbers[20:]) == list(range(20))
    assert numbers[:20] != numbers[20:] and numbers[:20] != list(range(20))
    config = _config(tmp_path, data, disable_shuffling=True)
    assert list(itertools.chain.from_iterable(s[0] for s in _steps(config)))[:20] == list(range(20))


@pytest.mark.parametrize("workers", [0, 2])
def test_start_in_the_middle_and_loading_processes(tmp_path, data, workers):
    config = _config(tmp_path, data, rows=2, accumulation=2, dataloader_num_workers=workers)
    assert _steps(config, start=3) == _steps(_config(tmp_path, data, rows=2, accumulation=2))[3:]


def test_records_are_read_as_they_are_needed(tmp_path, data, monkeypatch):
    read = []
    original = stream_module.read_file

    def counting(file):
        for record in original(file):
            read.append(record.line)
            yield record

    monkeypatch.setattr(stream_module, "read_file", counting)
    bundle = build(_config(tmp_path, {**data, "buffer_size": 4}, rows=2), byte_tokenizer())
    assert read == []
    next(bundle.train.micro_batches())
    assert len(read) <= 4 + 3


def test_held_out_records_are_not_trained_on(tmp_path, data):
    bundle = build(_config(tmp_path, {**data, "val_size": 5}), byte_tokenizer())
    held_out = {_number(ids) for batch in bundle.eval.batches() for ids, _ in rows_of(batch)}
    trained = {_number(ids) for step in bundle.train.micro_batches() for b in step for ids, _ in rows_of(b)}
    assert held_out == set(range(5)) and trained == set(range(5, 20))


def test_mixing(tmp_path, data):
    info = {}
    for name, first, count in (("low", 0, 4), ("high", 100, 40)):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"instruction": f"{first + i}|", "output": "a"} for i in range(count)])
        info[name] = {"file_name": f"{name}.jsonl"}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    data |= {"dataset": "low,high", "mix_strategy": "interleave_over"}
    numbers = list(itertools.chain.from_iterable(s[0] for s in _steps(_config(tmp_path, data, steps=10))))
    counts = collections.Counter(number >= 100 for number in numbers)
    assert counts[True] == counts[False] == 40
    data |= {"interleave_probs": "0.1,0.9"}
    numbers = list(itertools.chain.from_iterable(s[0] for s in _steps(_config(tmp_path, data, steps=10))))
    assert sum(number >= 100 for number in numbers) > 60


def test_pretraining_stream(tmp_path, data):
    file = write_jsonl(tmp_path / "t.jsonl", [{"text": f"{i}|" + "x" * 34} for i in range(4)])
    data |= {"dataset": {"file_name": file}, "cutoff_len": 16, "append_eod": True}
    config = _config(tmp_path, data, rows=3, steps=4, stage="pt", disable_shuffling=True)
    bundle = build(config, byte_tokenizer())
    ids = [row for step in bundle.train.micro_batches() for batch in step for row, _ in rows_of(batch)]
    text = byte_tokenizer().decode([token for row in ids for token in row])
    assert text == "".join(f"{i}|" + "x" * 34 + "</s>" for i in range(4))


def test_mistakes(tmp_path, data):
    bundle = build(_config(tmp_path, {**data, "cutoff_len": 2}), byte_tokenizer())
    with pytest.raises(UserError, match=r"no sample to train on is left of 20 streamed records: .*prompt fills"):
        next(bundle.train.micro_batches())
    with pytest.raises(UserError, match="exclude each other"):
        build(_config(tmp_path, {**data, "packing": True}), byte_tokenizer())


def test_errors_in_records_name_field_file_and_line(tmp_path, data):
    # Written with escapes, as a file holds half a surrogate pair.
    rows = [{"instruction": "q", "output": "a"}, {"instruction": "\ud800", "output": "a"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bundle = build(_config(tmp_path, data), byte_tokenizer())
    with pytest.raises(UserError, match=r"^data\.dataset: .*a\.jsonl:2: key 'instruction': .*surrogate"):
        next(bundle.train.micro_batches())


def test_empty_files_and_replies_are_said_once(tmp_path, data, caplog):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.jsonl").touch()
    write_jsonl(folder / "b.jsonl", [{"instruction": f"{i}|", "output": "a" * (i % 2)} for i in range(8)])
    data |= {"dataset": {"file_name": str(folder)}, "template": "default"}
    bundle = build(_config(tmp_path, data, rows=8, steps=3), byte_tokenizer())
    assert sum(batch["num_samples"] for step in bundle.train.micro_batches() for batch in step) == 24
    assert caplog.text.count("a.jsonl holds no records") == 1
    assert "stream, pass 1: 4 records have an empty reply" in caplog.text
