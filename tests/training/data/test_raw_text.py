"""Raw files given to --data-path: tokenized once, by one process, again whenever something has changed."""

import gzip
import json
import os

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from mindspeed_llm.training.data import raw_text
from mindspeed_llm.training.data.datasets import build_datasets
from mindspeed_llm.training.data.sources import check_data
from tests.support.tokenizers import byte_tokenizer
from tests.training.data.helpers import EOD, arguments, documents, save_tokenizer

RUN = "tests.training.data.rows:build_and_read"
TEXTS = [f"Text {i}: 谢谢 🙂 {'long ' * (i % 7)}" for i in range(40)]


@pytest.fixture
def folder(tmp_path):
    _write(tmp_path / "text.jsonl", TEXTS)
    save_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def _write(file, texts, column="text"):
    file.write_text("".join(json.dumps({column: text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")


def _words(folder, *names, split="80,10,10"):
    return ["--data-path", *names, "--split", split, "--tokenizer-name-or-path", folder / "tokenizer", "--append-eod"]


def _arguments(folder, *names, **changes):
    return arguments(*_words(folder, *(names or (folder / "text.jsonl",))), **changes)


def _stored(folder, pattern="text_*_text_document.idx"):
    return sorted((folder / "cache").glob(pattern))


def _counting(monkeypatch):
    calls = []
    original = raw_text.tokenize_files

    def counting(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(raw_text, "tokenize_files", counting)
    return calls


def test_the_samples_are_those_of_the_text(folder):
    found = build_datasets(_arguments(folder, micro_batch_size=1, global_batch_size=1, train_iters=1))
    tokenizer = byte_tokenizer()
    expected = [[*tokenizer.encode(text), EOD] for text in TEXTS]
    [index] = _stored(folder)
    reader = IndexedReader(index.with_suffix(""))
    assert [reader[i].tolist() for i in range(len(reader))] == expected
    # Less than an epoch was asked for: 80 % of the documents, each token but those of the last sample once.
    used = sorted(token for text in expected[:32] for token in text)
    read = [token for i in range(len(found.train.rows)) for token in found.train.rows[i][:-1].tolist()]
    assert 0 <= len(used) - len(read) <= 16
    assert len(found.train.rows) == (len(used) - 1) // 16


def test_as_preprocess_data_makes_it(folder):
    from mindspeed_llm.tasks.preprocess.command.main import main

    prefix = folder / "made" / "text"
    words = ["--input", folder / "text.jsonl", "--output-prefix", prefix, "--append-eod"]
    main([*map(str, words), "--tokenizer-name-or-path", str(folder / "tokenizer")])
    direct = build_datasets(_arguments(folder))
    from_prefix = build_datasets(_arguments(folder, f"{prefix}_text_document"))
    for ours, theirs in ((direct.train, from_prefix.train), (direct.valid, from_prefix.valid)):
        assert [ours.rows[i].tolist() for i in range(40)] == [theirs.rows[i].tolist() for i in range(40)]


def test_tokenized_once_and_again_when_something_changes(folder, monkeypatch):
    calls = _counting(monkeypatch)
    args = _arguments(folder)
    first = build_datasets(args).train.rows[0].tolist()
    assert build_datasets(args).train.rows[0].tolist() == first and len(calls) == 1
    # Same size and same time, other text.
    file = folder / "text.jsonl"
    before = file.stat()
    file.write_text(file.read_text().replace("long", "LONG"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    build_datasets(args)
    assert len(calls) == 2
    args.append_eod = False
    build_datasets(args)
    save_tokenizer(folder / "tokenizer", bos_token="<begin>")
    build_datasets(args)
    assert len(calls) == 4 and len(_stored(folder)) == 4


def test_folders_weights_and_other_layouts(folder):
    (folder / "many").mkdir()
    _write(folder / "many" / "1.jsonl", TEXTS[:10])
    (folder / "many" / "2.jsonl.gz").write_bytes(gzip.compress((folder / "text.jsonl").read_bytes()))
    build_datasets(_arguments(folder, folder / "many"))
    [index] = _stored(folder, "many_*_text_document.idx")
    assert len(IndexedReader(index.with_suffix(""))) == 10 + 40
    # Beside indexed files, with weights.
    documents(folder / "indexed", [200] * 20, seed=0)
    rows = build_datasets(_arguments(folder, "0.25", folder / "text.jsonl", "0.75", folder / "indexed")).train.rows
    from_text = IndexedReader(_stored(folder)[0].with_suffix("")).ids.tobytes()
    origin = [row[:-1].astype("int32").tobytes() in from_text for row in (rows[i] for i in range(80))]
    assert sum(origin) == 20
    # Another column; it is kept under the same name as any text.
    _write(folder / "other.jsonl", TEXTS, column="content")
    build_datasets(_arguments(folder, folder / "other.jsonl", json_keys=("content",)))
    assert len(_stored(folder, "other_*_text_document.idx")) == 1


def test_the_folder_of_the_flag(folder, tmp_path):
    build_datasets(_arguments(folder, data_cache_path=str(tmp_path / "elsewhere")))
    assert not (folder / "cache").exists() and list((tmp_path / "elsewhere").glob("text_*_text_document.bin"))
    (folder / "cache").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot be written to .*/cache .*another folder with --data-cache-path"):
        build_datasets(_arguments(folder))


def test_one_rank_tokenizes(folder, rank_pool):
    words = list(map(str, _words(folder, folder / "text.jsonl")))
    results = rank_pool.run(RUN, ranks=2, words=words)
    assert [(result["tokenized"], result["laid out"]) for result in results] == [(1, 3), (0, 0)]
    rows = [tuple(row) for result in results for batch in result["tokens"] for row in batch]
    assert len(set(rows)) == len(rows) == 8
    # The same data on one rank.
    single = build_datasets(arguments(*words)).train.rows
    assert set(rows) == {tuple(single[i][:-1].tolist()) for i in range(8)}


def test_one_rank_of_each_node_tokenizes_without_shared_storage(folder, rank_pool):
    words = [*map(str, _words(folder, folder / "text.jsonl")), "--no-shared-storage"]
    results = rank_pool.run(RUN, ranks=4, words=words, ranks_per_node=2)
    # Here the nodes do share a disk, so that the second one may find what the first one has made.
    assert results[1]["tokenized"] == results[3]["tokenized"] == results[1]["laid out"] == results[3]["laid out"] == 0
    assert results[0]["tokenized"] + results[2]["tokenized"] in (1, 2)
    rows = [tuple(row) for result in results for batch in result["tokens"] for row in batch]
    assert len(set(rows)) == len(rows) == 8


def test_a_mistake_reaches_all_ranks(folder, rank_pool):
    _write(folder / "text.jsonl", [" "] * 5)
    results = rank_pool.run(RUN, ranks=2, words=list(map(str, _words(folder, folder / "text.jsonl"))))
    assert results[0] == results[1] and "no sample to train on is left of 5 records" in results[0]["error"]


def test_mistakes(folder):
    file = folder / "text.jsonl"
    for changes, message in (
        ({"tokenizer_name_or_path": None}, r"--data-path .*text\.jsonl is raw text, which needs a tokenizer"),
        ({"json_keys": ("body",)}, r"text\.jsonl:1: .*'body'"),
        ({"json_keys": ("a", "b")}, r"--json-keys a b: training reads one column"),
        ({"handler_name": "AlpacaStyleInstructionHandler"}, r"makes instruction data, but pretraining takes text"),
        ({"handler_name": "GeneralPretrain"}, r"no such handler; did you mean GeneralPretrainHandler"),
        ({"handler_name": "AlpacaPretrainHandler", "json_keys": ("a",)}, r"--json-keys is for"),
    ):
        for check in (check_data, build_datasets):
            with pytest.raises(UserError, match=message):
                check(_arguments(folder, **changes))
    file.write_text("")
    with pytest.raises(UserError, match=r"text\.jsonl holds no records"):
        check_data(_arguments(folder))
    assert not (folder / "cache").exists()


def test_what_exists_is_checked_before_texts_are_tokenized(folder, monkeypatch):
    calls = _counting(monkeypatch)
    documents(folder / "short", [5], seed=0)
    words = ["--train-data-path", folder / "text.jsonl", "--valid-data-path", folder / "short"]
    with pytest.raises(UserError, match=r"--valid-data-path: .*short has 5 tokens for validation"):
        build_datasets(arguments(*words, "--tokenizer-name-or-path", folder / "tokenizer"))
    assert not calls
