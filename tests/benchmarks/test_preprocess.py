"""The benchmark of preprocessing runs, at toy size; its times say nothing here."""

import json
import re
import sys

import pytest

from benchmarks import preprocess
from tests.support.tokenizer_files import SENTENCES, byte_level_bpe, write_tokenizer


@pytest.fixture
def toys(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES), encoding="utf-8")
    config = {"tokenizer_class": "TokenizersBackend", "eos_token": "</s>"}
    tokenizer = write_tokenizer(tmp_path / "tokenizer", byte_level_bpe("</s>"), config)
    return ["--corpus", str(corpus), "--tokenizer", str(tokenizer)]


def test_all_parts(toys, capsys):
    sizes = ["--megabytes", "0.02", "--pairs", "1", "--memory-megabytes", "0.02", "0.04", "--vocab-size", "400"]
    preprocess.main([*toys, *sizes, "--workers", "2"])
    lines = capsys.readouterr().out.splitlines()
    expected = [
        r"text, 2 workers, ours: [\d.]+ s, [\d.]+ MB/s",
        r"text, 2 workers, floor: [\d.]+ s, [\d.]+ MB/s",
        r"speed of text / floor, 2 workers: median .*; bar 0\.95 (holds|MISSED)",
        r"seconds of a command of 100 documents: median .*; bar below 4 (holds|MISSED)",
        r"peak memory of all processes, 2 workers, 0\.02 MB of input: \d+ MB",
        r"peak memory of all processes, 2 workers, 0\.04 MB of input: \d+ MB",
        r"growth of peak memory: [\d.]+; bar at most 400 MB and 1\.10 times (holds|MISSED)",
    ]
    for pattern in expected:
        assert sum(bool(re.fullmatch(pattern, line)) for line in lines) == 1, (pattern, lines)


def test_the_floor_gives_the_ids_of_the_command(toys, tmp_path):
    """What both sides write is the same."""
    from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader

    for side in ("ours", "floor"):
        files = ["--input", toys[1], "--tokenizer", toys[3], "--output", str(tmp_path / side), "--workers", "1"]
        preprocess._run([sys.executable, "-m", "benchmarks.preprocess_side", "--side", side, *files])
    raw = (tmp_path / "floor.raw").read_bytes()
    assert raw == (tmp_path / "ours_text_document.bin").read_bytes()
    assert len(IndexedReader(tmp_path / "ours_text_document")) == len(SENTENCES)


def test_memory_of_children_counts():
    child = "x = bytearray(60_000_000); import time; time.sleep(1)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert 60 < preprocess.peak_megabytes([sys.executable, "-c", parent]) < 200


def test_a_failing_side_ends_the_benchmark(toys):
    with pytest.raises(SystemExit, match="failed:"):
        preprocess.main([*toys[:2], "--tokenizer", "/none", "--parts", "start"])
