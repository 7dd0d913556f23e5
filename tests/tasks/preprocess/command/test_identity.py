"""Content hashes, their memo, and what two sets of options differ in."""

import os
from dataclasses import asdict
from pathlib import Path

import pytest
import xxhash

from mindspeed_llm.tasks.preprocess.command import identity
from mindspeed_llm.tasks.preprocess.command.identity import InputFile, differences, hash_of, identify, inputs_hash


def test_hash_and_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_READ_BYTES", 7)
    for content, lines in ((b"", 0), (b"one", 1), (b"one\ntwo\n", 2), (b"one\ntwo\nthree and more", 3)):
        file = tmp_path / "a.txt"
        file.write_bytes(content)
        (found,) = identify([file])
        assert (found.size, found.hash, found.num_lines) == (len(content), xxhash.xxh3_128_hexdigest(content), lines)
        assert found.is_unchanged()
    file.write_text("other")
    assert not found.is_unchanged()


def test_unchanged_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file in files:
        file.write_text(file.name)
    known = [asdict(item) for item in identify(files)]
    read = []
    monkeypatch.setattr(identity, "_read", lambda path: read.append(path) or ("new", 1))
    assert [asdict(item) for item in identify(files, known)] == known and not read
    files[1].write_text("a text of another size")
    assert [item.hash for item in identify(files, known)] == [known[0]["hash"], "new"]
    files[1].write_text("c.txt")
    # As cp -p and rsync -t leave it.
    os.utime(files[1], ns=(known[1]["mtime_ns"],) * 2)
    assert files[1].stat().st_size == known[1]["size"] and files[1].stat().st_mtime_ns == known[1]["mtime_ns"]
    identify(files, known)
    assert read == [str(files[1])] * 2
    # A summary of before these were noted.
    identify(files[:1], [{name: known[0][name] for name in ("path", "size", "mtime_ns", "hash", "num_lines")}])
    assert read[2:] == [str(files[0])]


def test_the_content_counts_and_not_the_name(tmp_path: Path) -> None:
    for name, content in (("a.txt", "x"), ("b.txt", "x"), ("a.jsonl", "x"), ("c.txt", "y")):
        (tmp_path / name).write_text(content)
    hashes = {name: inputs_hash(identify([tmp_path / name])) for name in ("a.txt", "b.txt", "a.jsonl", "c.txt")}
    assert hashes["a.txt"] == hashes["b.txt"]
    assert len(set(hashes.values())) == 3
    both = [identify([tmp_path / "a.txt", tmp_path / "c.txt"]), identify([tmp_path / "c.txt", tmp_path / "a.txt"])]
    assert inputs_hash(both[0]) != inputs_hash(both[1])
    unread = [InputFile.found(tmp_path / name) for name in ("a.txt", "b.txt")]
    assert inputs_hash(unread[:1]) != inputs_hash(unread[1:])


def test_differences() -> None:
    assert differences({"a": 1, "b": [1], "c": None}, {"b": [1], "a": 2, "d": "x" * 99}) == [
        "a: 1 -> 2", "d: null -> " + "x" * 57 + "...",
    ]  # fmt: skip
    assert hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1}) != hash_of({"a": 1, "b": 3})
