"""Work on threads and processes: the same results in the same order, bounded memory, the first mistake first."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import engine
from mindspeed_llm.tasks.preprocess.chunks import Chunk
from mindspeed_llm.tasks.preprocess.engine import in_batches, num_chars, run_work
from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.text_work import TextWork
from mindspeed_llm.tasks.preprocess.tokenizers.rust_tokenizer import RustTokenizer
from tests.support.tokenizer_files import byte_level_bpe
from tests.support.tokenizers import byte_tokenizer


def _records(count, text="document {} "):
    return (Record(Path("a.jsonl"), line, {"text": text.format(line) * (line % 7)}) for line in range(1, count + 1))


class _Lengths:
    """Work in plain Python; refuses one line."""

    keys = ("text",)

    def __init__(self, refused=None, runs_in_threads=False):
        self.refused, self.runs_in_threads = refused, runs_in_threads

    def __call__(self, records):
        if any(record.line == self.refused for record in records):
            raise UserError(f"a.jsonl:{self.refused}: refused")
        lengths = np.array([len(record.data["text"]) for record in records], np.int32)
        return Chunk({"text": np.array([os.getpid()], np.int32)}, {"text": lengths}, len(records))


@pytest.mark.parametrize("workers", [1, 2, 3, engine._MOST_THREADS + 1])
def test_workers_change_nothing(workers):
    work = TextWork(byte_tokenizer(), append_eod=True)
    assert work.runs_in_threads
    one = [work(batch) for batch in in_batches(_records(300), 7)]
    many = list(run_work(in_batches(_records(300), 7), work, workers))
    assert [chunk.arrays["text"].tobytes() for chunk in many] == [chunk.arrays["text"].tobytes() for chunk in one]
    assert [chunk.skipped for chunk in many] == [chunk.skipped for chunk in one]


@pytest.mark.parametrize(("workers", "threads", "processes"), [(1, False, 1), (3, True, 1), (3, False, 3)])
def test_where_work_runs(workers, threads, processes):
    chunks = list(run_work(in_batches(_records(300), 7), _Lengths(runs_in_threads=threads), workers))
    found = {int(chunk.arrays["text"][0]) for chunk in chunks}
    assert (found == {os.getpid()}) == (processes == 1) and len(found) <= processes
    assert sum(chunk.num_records for chunk in chunks) == 300


def _then_fail(records):
    yield from records
    raise UserError("a.jsonl:101: not valid JSON")


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_first_mistake_of_the_input_is_reported(workers, threads):
    for refused, message in ((None, "a.jsonl:101: not valid JSON"), (95, "a.jsonl:95: refused"), (3, "a.jsonl:3")):
        chunks = run_work(in_batches(_then_fail(_records(100)), 5), _Lengths(refused, threads), workers)
        with pytest.raises(UserError, match=message):
            list(chunks)


@pytest.mark.parametrize("threads", [True, False])
def test_little_is_read_ahead(threads):
    read = []

    def watched():
        for record in _records(10000):
            read.append(record.line)
            yield record

    chunks = run_work(in_batches(watched(), 10), _Lengths(runs_in_threads=threads), 2)
    next(chunks)
    assert len(read) <= 10 * (2 * 2 + 2)
    chunks.close()


def test_batches_follow_the_text(monkeypatch):
    monkeypatch.setattr(engine, "BATCH_CHARS", 100)
    rows = [{"text": "a" * size} for size in (30, 30, 40, 500, 1, 1, 1, 1)]
    rows.append({"messages": [{"content": "x" * 60}, {"content": "y" * 60}], "number": 3})
    records = [Record(Path("a.jsonl"), line, row) for line, row in enumerate(rows, start=1)]
    assert [[record.line for record in batch] for batch in in_batches(records, 3)] == [
        [1, 2, 3],
        [4],
        [5, 6, 7],
        [8, 9],
    ]
    assert num_chars(rows[-1]) == 120
    assert list(in_batches([], 3)) == []


def test_the_threads_of_the_library_are_switched_off_meanwhile(monkeypatch):
    seen = []

    class Watching(_Lengths):
        def __call__(self, records):
            seen.append(os.environ["TOKENIZERS_PARALLELISM"])
            return super().__call__(records)

    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    list(run_work(in_batches(_records(10), 5), Watching(runs_in_threads=True), 2))
    assert seen == ["false", "false"] and "TOKENIZERS_PARALLELISM" not in os.environ
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    list(run_work(in_batches(_records(10), 5), Watching(), 1))
    assert seen == ["false"] * 4 and os.environ["TOKENIZERS_PARALLELISM"] == "true"


class _Slow(TextWork):
    runs_in_threads = False


def test_processes_work_although_the_library_has_used_its_threads(monkeypatch):
    """A forked process has none of the library's threads, and would wait for them forever."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    tokenizer = byte_tokenizer()
    texts = [record.data["text"] for record in _records(500)]
    tokenizer.backend_tokenizer.encode_batch(texts)
    chunks = list(run_work(in_batches(_records(500), 100), _Slow(tokenizer), 2))
    assert sum(chunk.num_records for chunk in chunks) == 500


def test_tokenizers_run_in_threads_at_once():
    """Several threads may encode with one tokenizer, and get what each would get alone."""
    backend = byte_level_bpe("</s>")
    work = TextWork(RustTokenizer(backend, content_hash="", special={"eos_token": "</s>"}))
    batches = list(in_batches(_records(2000, "mixed {} 谢谢 text\n"), 20))
    for batch, chunk in zip(batches, run_work(iter(batches), work, 4), strict=True):
        encoded = backend.encode_batch([record.data["text"] for record in batch])
        assert chunk.arrays["text"].tolist() == [token for encoding in encoded for token in encoding.ids]


class _Killed:
    """Work whose process is killed at the second batch, as the system does it where memory runs out."""

    keys = ("x",)

    def __call__(self, records):
        if records[0].line > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return Chunk({"x": np.ones(1, np.int32)}, {"x": np.ones(1, np.int32)}, len(records))


def test_a_worker_that_is_killed_is_named():
    batches = iter([[Record(Path("a"), line, {})] for line in range(1, 9)])
    with pytest.raises(UserError, match="a worker process was killed, most likely because memory ran out"):
        list(run_work(batches, _Killed(), 2))
