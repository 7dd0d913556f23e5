"""Pretraining samples against megatron-core's GPTDataset and blending, and against plain loops."""

import numpy as np
import pytest

from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, IndexedWriter
from mindspeed_llm.tasks.preprocess.pretrain_samples import (
    PretrainSamples,
    SampleIndex,
    SequentialSamples,
    blend_order,
    samples_per_epoch,
    split_documents,
)


def _corpus(prefix, lengths):
    """Documents of the given lengths; token values are their place in the corpus."""
    with IndexedWriter(prefix) as writer:
        writer.add_many(np.arange(sum(lengths)), lengths)
    return IndexedReader(prefix)


LENGTHS = np.random.RandomState(3).randint(0, 60, size=40).tolist()


@pytest.mark.parametrize(
    ("lengths", "sequence", "num_samples", "seed"),
    [
        (LENGTHS, 16, 10, 1),  # within one epoch
        (LENGTHS, 16, 150, 42),  # several epochs
        (LENGTHS, 16, 80, 7),  # little of the last epoch: kept apart
        (LENGTHS, 1000, 5, 7),  # samples longer than most documents
        ([0, 0, 7, 0], 4, 20, 5),  # empty documents, tiny corpus
        ([5], 64, 3, 5),  # corpus shorter than a sample
    ],
)
def test_equal_to_megatron_core(tmp_path, lengths, sequence, num_samples, seed):
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        vocab_size, eod, pad, unique_identifiers = 32000, 31999, 31998, {}

    config = gpt.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence,
        split="100,0,0",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        path_to_cache=str(tmp_path / "cache"),
        mid_level_dataset_surplus=0.0,
    )
    reader = _corpus(tmp_path / "a", lengths)
    documents = np.arange(len(lengths), dtype=np.int32)
    theirs = gpt.GPTDataset(
        IndexedDataset(str(tmp_path / "a")), str(tmp_path / "a"), documents, num_samples, Split.train, config
    )
    ours = PretrainSamples(reader, SampleIndex.build(reader.lengths, documents, num_samples, sequence, seed), sequence)
    assert len(ours) == len(theirs) >= num_samples
    for i in range(len(ours)):
        item = theirs[i]
        assert ours[i][:-1].tolist() == item["tokens"].tolist()
        assert ours[i][1:].tolist() == item["labels"].tolist()


def test_no_token_is_lost(tmp_path):
    # One epoch, long and short documents: the samples without their overlap are the documents end to end.
    lengths = [3, 500, 1, 0, 40]
    reader = _corpus(tmp_path / "a", lengths)
    index = SampleIndex.build(reader.lengths, np.arange(5, dtype=np.int32), 1, 8, 0)
    samples = PretrainSamples(reader, index, 8)
    joined = np.concatenate([reader[int(d)] for d in index.documents])
    in_order = [samples[i] for i in np.argsort(index.shuffle)]
    assert np.concatenate([sample[:-1] for sample in in_order]).tolist() == joined[: len(samples) * 8].tolist()
    assert len(samples) == samples_per_epoch(544, 8) == 67


def test_sequential_samples_have_every_token_as_target_once(tmp_path):
    reader = _corpus(tmp_path / "a", [0, 5, 20, 0, 9])
    samples = SequentialSamples(reader, np.array([1, 2, 4], dtype=np.int32), 8)
    rows = [samples[i] for i in range(len(samples))]
    assert [len(row) for row in rows] == [9, 9, 9, 9, 2]
    assert np.concatenate([row[1:] for row in rows]).tolist() == list(range(1, 34))
    assert np.concatenate([row[:-1] for row in rows]).tolist() == list(range(33))


def test_split():
    parts = split_documents(10, "80,10,10")
    assert [part.tolist() for part in parts] == [list(range(8)), [8], [9]]
    assert [len(part) for part in split_documents(10, "100,0,0")] == [10, 0, 0]
    assert [len(part) for part in split_documents(7, "1,1")] == [4, 3, 0]


@pytest.mark.parametrize("weights", [[0.3, 0.7], [0.001, 0.999], [5.0, 3.0, 2.0]])
def test_blend_equals_megatron_core(weights):
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp")
    shares = (np.array(weights) / sum(weights)).tolist()
    which, sample = np.zeros(1000, dtype=np.int16), np.zeros(1000, dtype=np.int64)
    helpers.build_blending_indices(which, sample, np.array(shares), len(weights), 1000, False)
    ours = blend_order(weights, 1000)
    assert ours[0].tolist() == which.tolist()
    assert ours[1].tolist() == sample.tolist()


def test_no_tokens():
    with pytest.raises(ValueError, match="no tokens"):
        SampleIndex.build(np.zeros(3, dtype=np.int32), np.arange(3, dtype=np.int32), 1, 8, 0)
