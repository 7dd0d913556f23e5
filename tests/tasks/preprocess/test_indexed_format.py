"""Indexed files against megatron-core's reader and writer, and damaged files."""

import pickle
import struct

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


def _header(code=4, version=1, num_sequences=0, num_documents=1):
    return struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", version, code, num_sequences, num_documents)


def _index(lengths, offsets, documents, code=4):
    arrays = (np.array(lengths, "<i4"), np.array(offsets, "<i8"), np.array(documents, "<i8"))
    return _header(code, 1, len(lengths), len(documents)) + b"".join(array.tobytes() for array in arrays)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_header(version=2) + bytes(8), "not an index file of Megatron's format"),
        (_header(code=9) + bytes(8), "not an index file of Megatron's format"),
        (_header(code=7) + bytes(8), "numbers of type float32; expected token ids"),
        (_header(num_sequences=2**60) + bytes(8), "is damaged: 42 bytes, expected 1383505805528216"),
        (_index([2], [0], [0, 1]) + b"\0", "multimodal"),
        (_index([2], [0], [0, 1]) + b"\0\0", r"is damaged: 64 bytes, expected 62"),
        (_index([2], [0], []), "its documents do not span its 1 sequences"),
        (_index([2], [0], [0, 2]), "its documents do not span its 1 sequences"),
        (_index([2], [0], [1, 1]), "its documents do not span its 1 sequences"),
        (_index([3], [0], [0, 1]), r"a\.bin is damaged: 8 bytes, but the index speaks of 12; the two may come"),
        (_index([1], [0], [0, 1]), r"a\.bin is damaged: 8 bytes, but the index speaks of 4"),
        (_index([], [], [0]), r"a\.bin is damaged: 8 bytes, but the index speaks of 0"),
    ],
)
def test_foreign_and_mixed_up_files(tmp_path, content, message):
    (tmp_path / "a.idx").write_bytes(content)
    (tmp_path / "a.bin").write_bytes(bytes(8))
    with pytest.raises(UserError, match=message):
        IndexedReader(tmp_path / "a")


@pytest.mark.parametrize(
    ("lengths", "offsets", "documents", "message"),
    [
        ([3, -1, 2], [0, 12, 8], [0, 1, 2, 3], r"sequence 1 of -1 tokens lies at byte 12, expected 12"),
        ([1, 1, 2], [0, 8, 8], [0, 1, 2, 3], r"sequence 1 of 1 tokens lies at byte 8, expected 4"),
        ([1, 1, 2], [4, 4, 8], [0, 1, 2, 3], r"sequence 0 of 1 tokens lies at byte 4, expected 0"),
        ([1, 1, 2], [0, 4, 8], [0, 2, 1, 3], "its document boundaries do not ascend"),
    ],
)
@pytest.mark.parametrize("block", [1, 2, 100])
def test_check_looks_at_everything(tmp_path, monkeypatch, lengths, offsets, documents, message, block):
    monkeypatch.setattr(indexed_format, "_BLOCK", block)
    (tmp_path / "a.idx").write_bytes(_index(lengths, offsets, documents))
    (tmp_path / "a.bin").write_bytes(bytes(16))
    with pytest.raises(UserError, match=message):
        IndexedReader(tmp_path / "a").check()
    _write(tmp_path / "b")
    IndexedReader(tmp_path / "b").check()


def test_sentences_and_empty_documents_as_megatron_core_reads_them(tmp_path):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    sequences = [[], [1, 2], [3], [], [70000 % 65536], []]
    with IndexedWriter(tmp_path / "a_text_sentence", np.uint16) as writer:
        ids = np.concatenate([np.array(sequence, np.uint16) for sequence in sequences])
        writer.add_many(ids, [len(sequence) for sequence in sequences], np.array([0, 3, 0, 1, 2, 0]))
    ours, theirs = (
        IndexedReader(tmp_path / "a_text_sentence"),
        indexed.IndexedDataset(str(tmp_path / "a_text_sentence")),
    )
    ours.check()
    assert [ours[i].tolist() for i in range(len(ours))] == [theirs[i].tolist() for i in range(len(theirs))] == sequences
    assert ours.documents.tolist() == theirs.document_indices.tolist() == [0, 0, 3, 3, 4, 6, 6]
    assert ours.dtype == theirs.index.dtype == np.uint16 and ours.lengths.tolist() == theirs.sequence_lengths.tolist()
    assert ours.get(1, 2).tolist() == ours.get(0).tolist() == []


def test_nothing_at_all(tmp_path):
    with IndexedWriter(tmp_path / "a"):
        pass
    reader = IndexedReader(tmp_path / "a")
    reader.check()
    assert len(reader) == 0 and reader.documents.tolist() == [0]


def test_offsets_beyond_4_gib(tmp_path):
    # A sparse file: 5 GiB of nothing, then three tokens.
    hole = 5 * 2**30
    (tmp_path / "a.idx").write_bytes(_index([hole // 8, hole // 8, 3], [0, hole // 2, hole], [0, 1, 2, 3]))
    with (tmp_path / "a.bin").open("wb") as stream:
        stream.seek(hole)
        stream.write(np.array([7, 8, 9], "<i4").tobytes())
    reader = IndexedReader(tmp_path / "a")
    reader.check()
    assert reader[2].tolist() == [7, 8, 9] and reader.get(2, 1, 1).tolist() == [8]
    assert reader.get(1, hole // 8 - 2).tolist() == [0, 0]
    for wrong in ((2, -1, 1), (2, 3, 1), (2, 0, 4)):
        with pytest.raises(IndexError):
            reader.get(*wrong)
