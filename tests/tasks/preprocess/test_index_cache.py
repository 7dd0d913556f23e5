"""The index cache: built once, never stale, repaired when damaged, written where it can be."""

import errno
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import index_cache, pretrain_blend
from mindspeed_llm.tasks.preprocess.index_cache import IndexCache, IndexRequest, index_identity
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from mindspeed_llm.tasks.preprocess.pretrain_blend import PretrainLayout, PretrainSource, pretrain_samples
from tests.tasks.preprocess.corpora import corpus

CONTENT = {"numbers": np.arange(1000).reshape(-1, 2), "order": np.array([2, 0, 1], dtype=np.uint32)}


class _Request:
    """A request that counts how often it is built."""

    def __init__(self, folder, key=1, content=CONTENT):
        self.built, self._content = 0, content
        self.request = IndexRequest("data", folder / "data", {"key": key}, self._build)

    def _build(self):
        self.built += 1
        return self._content


def _same(arrays):
    return sorted(arrays) == sorted(CONTENT) and all(
        np.array_equal(arrays[name], CONTENT[name]) and arrays[name].dtype == CONTENT[name].dtype for name in CONTENT
    )


def test_built_once_and_mapped(tmp_path):
    one, other = _Request(tmp_path), _Request(tmp_path, key=2)
    for _ in range(2):
        arrays = IndexCache().arrays([one.request, other.request, one.request])
        assert len(arrays) == 3 and all(map(_same, arrays))
        assert isinstance(arrays[0]["numbers"], np.memmap) and not arrays[0]["numbers"].flags.writeable
    assert (one.built, other.built) == (1, 1)
    assert len(list((tmp_path / "cache").iterdir())) == 6
    assert not [file for file in (tmp_path / "cache").iterdir() if file.name.startswith(".")]


def _truncate(file: Path):
    os.truncate(file, file.stat().st_size - 1)


def _flip(file: Path):
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [_truncate, _flip, lambda file: os.truncate(file, 0), Path.unlink])
@pytest.mark.parametrize("suffix", ["numbers.npy", "order.npy", ".json"])
def test_damaged_files_are_built_again(tmp_path, caplog, damage, suffix):
    request = _Request(tmp_path)
    IndexCache().arrays([request.request])
    file = next(file for file in (tmp_path / "cache").iterdir() if file.name.endswith(suffix))
    damage(file)
    assert all(map(_same, IndexCache().arrays([request.request])))
    assert request.built == 2
    # Without its description there is no index, and nothing to say.
    assert ("is damaged" in caplog.text) == (file.exists() and not (damage is Path.unlink and suffix == ".json"))
    caplog.clear()
    IndexCache().arrays([request.request])
    assert request.built == 2 and not caplog.text


def test_an_interrupted_build_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    request = _Request(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", _failing(Path.write_text, KeyboardInterrupt(), after=0))
        with pytest.raises(KeyboardInterrupt):
            IndexCache().arrays([request.request])
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".npy", ".npy"]
    assert _same(IndexCache().arrays([request.request])[0]) and request.built == 2


def _failing(function, error, *, after):
    calls = 0

    def call(*arguments, **keywords):
        nonlocal calls
        calls += 1
        if calls > after:
            raise error
        return function(*arguments, **keywords)

    return call


def test_where_the_data_folder_cannot_be_written(tmp_path, caplog):
    caplog.set_level(logging.INFO, "mindspeed_llm")
    (tmp_path / "cache").write_text("in the way")
    request = _Request(tmp_path)
    fallback = tmp_path / "output" / "dataset_cache"
    for _ in range(2):
        assert _same(IndexCache(fallback=fallback).arrays([request.request])[0])
    assert request.built == 1 and len(list(fallback.iterdir())) == 3
    assert f"cannot be written (File exists); using {fallback}" in caplog.text
    with pytest.raises(UserError, match=r"cache: the sample index cannot be written \(File exists\); make it writable"):
        IndexCache().arrays([request.request])


def test_a_full_disk(tmp_path, monkeypatch):
    request = _Request(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(index_cache.np, "save", _failing(np.save, full, after=1))
    with pytest.raises(UserError, match="No space left on device"):
        IndexCache().arrays([request.request])
    assert not [file for file in (tmp_path / "cache").iterdir() if file.name.startswith(".")]


def test_a_folder_of_the_users_choice(tmp_path):
    chosen = tmp_path / "chosen"
    IndexCache(chosen, fallback=tmp_path / "other").arrays([_Request(tmp_path).request])
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["chosen"]


def test_one_process_builds_for_the_others(tmp_path):
    request = _Request(tmp_path)
    IndexCache(build_once=lambda exists, build: build()).arrays([request.request])
    # Another process only waits.
    assert _same(IndexCache(build_once=lambda exists, build: None).arrays([request.request])[0])
    assert request.built == 1
    with pytest.raises(UserError, match=r"was built, but cannot be seen from here; looked in .*cache\. Use storage"):
        IndexCache(build_once=lambda exists, build: None).arrays([_Request(tmp_path, key=3).request])


def test_what_another_node_has_written_and_mapped_stays(tmp_path):
    request = _Request(tmp_path)
    IndexCache().arrays([request.request])
    before = {file.name: file.stat().st_ino for file in (tmp_path / "cache").glob("*.npy")}
    IndexCache(build_once=lambda exists, build: build()).arrays([request.request])
    assert request.built == 2
    assert {file.name: file.stat().st_ino for file in (tmp_path / "cache").glob("*.npy")} == before


def _build_in_process(folder, start, results):
    start.wait()
    results.put(_same(IndexCache().arrays([_Request(folder).request])[0]))


def test_processes_that_know_nothing_of_each_other(tmp_path):
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_build_in_process, args=(tmp_path, start, results)) for _ in range(6)]
    for process in processes:
        process.start()
    start.set()
    assert [results.get(timeout=60) for _ in processes] == [True] * 6
    for process in processes:
        process.join()
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_other_processes_map_the_index_themselves(tmp_path):
    sources = [PretrainSource(corpus(tmp_path / name, [100] * 500), range(500)) for name in "ab"]
    rows = pretrain_samples(sources, None, None, PretrainLayout(sequence_length=8, seed=1), IndexCache())
    sent = pickle.dumps(rows)
    assert len(sent) < 2000
    copy = pickle.loads(sent)
    assert len(copy) == len(rows) and all(np.array_equal(copy[i], rows[i]) for i in range(0, len(rows), 100))


LENGTHS = [40, 3, 17, 90, 8, 61]


def _samples(prefix, *, num_samples=60, sequence=8, seed=1, extra=True, documents=None):
    reader = IndexedReader(prefix)
    source = PretrainSource(reader, documents or range(len(reader)))
    layout = PretrainLayout(sequence_length=sequence, seed=seed, extra_token=extra)
    rows = pretrain_samples([source], None, num_samples, layout, IndexCache())
    return [rows[i].tolist() for i in range(len(rows))]


def _regenerate(prefix, lengths, first):
    """Other data under the old name, of the same size, and with the old time of change."""
    stamps = {suffix: Path(f"{prefix}{suffix}").stat() for suffix in (".bin", ".idx")}
    corpus(prefix, lengths, first)
    for suffix, stamp in stamps.items():
        assert Path(f"{prefix}{suffix}").stat().st_size == stamp.st_size
        os.utime(f"{prefix}{suffix}", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1]], ids=["same lengths", "other lengths"])
def test_regenerated_data_never_meet_a_stale_index(tmp_path, lengths):
    corpus(tmp_path / "a", LENGTHS)
    before = _samples(tmp_path / "a")
    _regenerate(tmp_path / "a", lengths, first=5000)
    corpus(tmp_path / "fresh" / "a", lengths, first=5000)
    assert _samples(tmp_path / "a") == _samples(tmp_path / "fresh" / "a") != before


def test_a_key_of_names_and_times_would_be_stale(tmp_path, monkeypatch):
    def by_name_and_time(reader):
        status = Path(f"{reader.prefix}.idx").stat()
        return {"name": str(reader.prefix), "size": status.st_size, "time": status.st_mtime_ns}

    monkeypatch.setattr(pretrain_blend, "index_identity", by_name_and_time)
    corpus(tmp_path / "a", LENGTHS)
    _samples(tmp_path / "a")
    _regenerate(tmp_path / "a", LENGTHS[::-1], first=5000)
    corpus(tmp_path / "fresh" / "a", LENGTHS[::-1], first=5000)
    try:
        stale = _samples(tmp_path / "a")
    except IndexError:
        return
    assert stale != _samples(tmp_path / "fresh" / "a")


def test_everything_that_decides_an_index_is_in_its_name(tmp_path):
    corpus(tmp_path / "a", LENGTHS)
    for number, change in enumerate(
        [{}, {"num_samples": 61}, {"sequence": 7}, {"seed": 2}, {"extra": False}, {"documents": range(5)}], start=1
    ):
        _samples(tmp_path / "a", **change)
        assert len(list((tmp_path / "cache").glob("a_*.json"))) == number
    # The type of the ids alone changes the size of the data.
    one, two = corpus(tmp_path / "b", LENGTHS), corpus(tmp_path / "c", LENGTHS, dtype=np.uint16)
    assert index_identity(one) == index_identity(IndexedReader(tmp_path / "a")) != index_identity(two)


def test_the_reading_side_imports_no_backend():
    modules = ("pretrain_inputs", "pretrain_blend", "sample_order", "index_cache")
    code = "import sys\n" + "".join(f"import mindspeed_llm.tasks.preprocess.{module}\n" for module in modules)
    code += "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'megatron', 'transformers'}))\n"
    code += "print('mindspeed_llm.fsdp2' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == ["[]", "False"]
