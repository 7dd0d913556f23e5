"""Indexed files against megatron-core's reader and writer, and damaged files."""

import pickle

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import indexed_format
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, IndexedWriter, indexed_exists

SEQUENCES = [[5, 6, 7], [], [1], list(range(1000))]


def _write(prefix, dtype=np.int32):
    with IndexedWriter(prefix, dtype) as writer:
        writer.add(np.array(SEQUENCES[0]))
        writer.add_many(np.concatenate(SEQUENCES[1:]).astype(np.int64), [len(s) for s in SEQUENCES[1:]])


def test_round_trip_and_pickling(tmp_path):
    _write(tmp_path / "a")
    reader = IndexedReader(tmp_path / "a")
    for copy in (reader, pickle.loads(pickle.dumps(reader))):
        assert [copy[i].tolist() for i in range(len(copy))] == SEQUENCES
    assert reader.get(3, 10, 3).tolist() == [10, 11, 12]
    assert reader.documents.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(IndexError):
        reader.get(0, 1, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_same_bytes_as_megatron_core(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    _write(tmp_path / "ours", dtype)
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for sequence in SEQUENCES:
        builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    dataset = indexed.IndexedDataset(str(tmp_path / "ours"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == SEQUENCES
    theirs = IndexedReader(tmp_path / "theirs")
    assert [theirs[i].tolist() for i in range(len(theirs))] == SEQUENCES


def test_documents_of_several_sequences_and_whole_files(tmp_path, monkeypatch):
    """Small blocks, so that every array of the index is written in several."""
    monkeypatch.setattr(indexed_format, "_BLOCK", 2)
    documents = [[[1, 2], [3]], [[4, 5, 6]], [], [[7], [], [8, 9], [10]]]
    sequences = [sequence for document in documents for sequence in document]
    for name, part in (("a", documents[:2]), ("b", documents[2:]), ("whole", documents)):
        flat = [np.array(sequence, np.int32) for document in part for sequence in document]
        with IndexedWriter(tmp_path / name) as writer:
            writer.add_many(np.concatenate(flat), [len(item) for item in flat], np.array([len(d) for d in part]))
    with IndexedWriter(tmp_path / "joined") as writer:
        for name in ("a", "b"):
            writer.add_file(IndexedReader(tmp_path / name))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"joined{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    reader = IndexedReader(tmp_path / "joined")
    assert [reader[i].tolist() for i in range(len(reader))] == sequences
    assert reader.documents.tolist() == [0, 2, 3, 3, 7]
    with (
        pytest.raises(ValueError, match="documents of 3 sequences, but there are 2"),
        IndexedWriter(tmp_path / "c") as w,
    ):
        w.add_many(np.array([1, 2]), [1, 1], np.array([3]))


def test_an_interrupted_writer_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "a") as writer:
        writer.add(np.array([1]))
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []
    assert not indexed_exists(tmp_path / "a")


def test_damaged_files(tmp_path):
    with pytest.raises(UserError, match=r"a\.idx does not exist"):
        IndexedReader(tmp_path / "a")
    _write(tmp_path / "a")
    index, data = (tmp_path / "a.idx").read_bytes(), (tmp_path / "a.bin").read_bytes()
    for content, message in ((b"x" * 50, "is not an index file"), (index[:40], "expected 122"), (b"", "shorter")):
        (tmp_path / "a.idx").write_bytes(content)
        with pytest.raises(UserError, match=message):
            IndexedReader(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(data[:-1])
    with pytest.raises(UserError, match=r"a\.bin is damaged: 4015 bytes, but the index speaks of 4016"):
        IndexedReader(tmp_path / "a")


def test_lengths_must_fit(tmp_path):
    with pytest.raises(ValueError, match="lengths sum to 3, but there are 2 ids"), IndexedWriter(tmp_path / "a") as w:
        w.add_many(np.array([1, 2]), [3])
