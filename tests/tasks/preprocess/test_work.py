"""Tokenizing files: the same on any number of processes, nothing lost, skipped records counted by reason."""

import json

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Summary
from mindspeed_llm.tasks.preprocess.conversation_work import ConversationWork
from mindspeed_llm.tasks.preprocess.dataset_info import resolve_datasets
from mindspeed_llm.tasks.preprocess.engine import tokenize_files
from mindspeed_llm.tasks.preprocess.render import TemplateRenderer
from mindspeed_llm.tasks.preprocess.sample_store import SampleStore, read_summary, store_exists, write_store
from mindspeed_llm.tasks.preprocess.samples import NO_ROOM, SampleOptions
from mindspeed_llm.tasks.preprocess.templates import load_template
from mindspeed_llm.tasks.preprocess.text_work import EMPTY_TEXT, ONE_TOKEN, TextColumn, TextWork
from tests.support.tokenizers import byte_tokenizer

TEXTS = ["short", "", "谢谢 🙂 " * 30, " \n", "last"]


def _jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _run(file, work, **options):
    summary = Summary()
    chunks = list(tokenize_files([file], work, summary, **options))
    return np.concatenate([chunk.first_lengths for chunk in chunks]), chunks, summary


def test_documents_keep_every_byte(tmp_path):
    tokenizer = byte_tokenizer()
    file = _jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    lengths, chunks, summary = _run(file, TextWork(tokenizer, append_eod=True), batch_size=2)
    kept = [text for text in TEXTS if text.strip()]
    assert tokenizer.decode(np.concatenate([c.arrays["text"] for c in chunks])) == "".join(t + "</s>" for t in kept)
    assert lengths.tolist() == [len(text.encode()) + 1 for text in kept]
    assert (summary.num_records, summary.num_samples, summary.skipped) == (5, 3, {EMPTY_TEXT: 2})
    assert summary.first_skipped[EMPTY_TEXT] == [f"{file}:2", f"{file}:4"]


def test_pieces_are_a_partition(tmp_path):
    file = _jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    lengths, _, _ = _run(file, TextWork(byte_tokenizer(), piece_length=50))
    assert lengths.max() == 50 and lengths.sum() == sum(len(t.encode()) for t in TEXTS if t.strip())
    assert lengths.tolist() == [5, *[50] * 7, 10, 4]


def test_documents_of_one_token_are_dropped_only_where_asked(tmp_path):
    file = _jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ("a", "b" * 21, "c" * 20, "dd")])
    kept, _, summary = _run(file, TextWork(byte_tokenizer(), piece_length=10))
    assert kept.tolist() == [1, 10, 9, 2, 10, 10, 2] and not summary.skipped
    lengths, chunks, summary = _run(file, TextWork(byte_tokenizer(), piece_length=10, drop_single_tokens=True))
    assert lengths.tolist() == [10, 9, 2, 10, 10, 2]
    assert byte_tokenizer().decode(np.concatenate([c.arrays["text"] for c in chunks])) == "b" * 21 + "c" * 20 + "dd"
    assert summary.skipped == {ONE_TOKEN: 1} and summary.first_skipped == {ONE_TOKEN: [f"{file}:1"]}
    # Whole documents are joined, so that they may be short.
    assert _run(file, TextWork(byte_tokenizer()))[0].tolist() == [1, 21, 20, 2]


BROKEN = "half \ud800"


@pytest.mark.parametrize("workers", [1, 2])
def test_half_a_surrogate_pair_names_file_line_and_key(tmp_path, workers):
    message = r"a\.jsonl:3: key '{}': the text holds half of a surrogate pair"
    file = _jsonl(tmp_path / "a.jsonl", [*[{"text": "a"}] * 2, {"text": BROKEN}])
    with pytest.raises(UserError, match=message.format("text")):
        _run(file, TextWork(byte_tokenizer()), num_workers=workers)
    good = {"instruction": "q", "output": "a"}
    for key, value in (("instruction", BROKEN), ("output", BROKEN), ("history", [["q", BROKEN]])):
        _jsonl(file, [good, good, {**good, key: value}])
        with pytest.raises(UserError, match=message.format(key)):
            _run(file, _alpaca_work(file, 100), num_workers=workers)


def test_any_text_that_the_tokenizer_refuses_is_named(tmp_path):
    class Picky:
        eos_token_id = pad_token_id = None

        def __call__(self, texts, **_):
            if "bad" in texts:
                raise ValueError("no such piece")
            return {"input_ids": [[1, 2] for _ in texts]}

    file = _jsonl(tmp_path / "a.jsonl", [{"text": "good"}, {"text": "bad"}])
    with pytest.raises(
        UserError, match=r"a\.jsonl:2: the tokenizer cannot take the text \(ValueError: no such piece\)"
    ):
        _run(file, TextWork(Picky()))


def test_empty_files_among_others(tmp_path, caplog):
    files = [_jsonl(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", []), ("b", [{"text": "t"}]), ("c", []))]
    summary = Summary()
    assert len(list(tokenize_files(files, TextWork(byte_tokenizer()), summary))) == 1
    assert [f"{name}.jsonl holds no records" in caplog.text for name in "abc"] == [True, False, True]
    with pytest.raises(UserError, match=r"none of the 2 data files in .* holds a record"):
        list(tokenize_files([files[0], files[2]], TextWork(byte_tokenizer()), summary))


def test_empty_replies_are_counted(tmp_path, caplog):
    rows = [{"instruction": "q", "output": text} for text in ("", "a", " ")]
    file = _jsonl(tmp_path / "a.jsonl", rows)
    _, _, summary = _run(file, _alpaca_work(file, 100), batch_size=2)
    assert (summary.num_samples, summary.empty_replies) == (3, 2)
    assert "2 records have an empty reply" in caplog.text


def test_errors_of_workers_arrive(tmp_path):
    file = _jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 20 + [{"text": 3}])
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"a\.jsonl:21: key 'text': expected text, found int"):
            _run(file, TextWork(byte_tokenizer()), batch_size=5, num_workers=workers)


def test_limits_and_mistakes(tmp_path):
    file = _jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 20)
    assert len(_run(file, TextWork(byte_tokenizer()), max_records=7)[0]) == 7
    with pytest.raises(UserError, match=r"no key 'body' \(the text column\)"):
        _run(file, TextWork(byte_tokenizer(), text_of=TextColumn("body")))
    with pytest.raises(UserError, match=r"empty\.jsonl holds no records"):
        _run(_jsonl(tmp_path / "empty.jsonl", []), TextWork(byte_tokenizer()))
    with pytest.raises(UserError, match="no eos token to append"):
        TextWork(byte_tokenizer(eos_token=None), append_eod=True)


def _alpaca_work(file, cutoff_len):
    (entry,) = resolve_datasets({"file_name": str(file)}, file.parent)
    renderer = TemplateRenderer(load_template("default"), byte_tokenizer())
    return ConversationWork(renderer, SampleOptions(cutoff_len), [entry.layout])


def test_conversations_to_a_store(tmp_path):
    rows = [{"instruction": "q" * n, "output": "answer"} for n in (1, 500, 2)]
    file = _jsonl(tmp_path / "a.jsonl", rows)
    work, summary = _alpaca_work(file, 100), Summary()
    write_store(tmp_path / "out" / "x", work.keys, tokenize_files([file], work, summary), summary)
    assert store_exists(tmp_path / "out" / "x")
    assert read_summary(tmp_path / "out" / "x") == summary
    assert summary.skipped == {NO_ROOM: 1} and summary.first_skipped == {NO_ROOM: [f"{file}:2"]}
    store = SampleStore(tmp_path / "out" / "x")
    tokenizer = byte_tokenizer()
    ids, labels = store[1]
    assert tokenizer.decode(ids) == "Human: qq\nAssistant:answer</s>"
    assert tokenizer.decode(labels[labels != -100]) == "answer</s>"


def test_store_without_samples_is_an_error_and_leaves_nothing(tmp_path):
    file = _jsonl(tmp_path / "a.jsonl", [{"instruction": "q" * 200, "output": "a"}])
    work, summary = _alpaca_work(file, 100), Summary()
    with pytest.raises(UserError, match="no sample to train on is left of 1 records: 1 records skipped: prompt fills"):
        write_store(tmp_path / "out" / "x", work.keys, tokenize_files([file], work, summary), summary)
    assert list((tmp_path / "out").iterdir()) == []


def test_errors_inside_a_record_name_it(tmp_path):
    file = _jsonl(tmp_path / "a.jsonl", [{"instruction": "q", "output": "a", "tools": "{"}])
    with pytest.raises(UserError, match=r"a\.jsonl:1: tools: not valid JSON"):
        _run(file, _alpaca_work(file, 100))
