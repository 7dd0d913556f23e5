"""Pretraining samples of one file against megatron-core's GPTDataset, and against plain loops."""

import numpy as np
import pytest

from mindspeed_llm.tasks.preprocess import pretrain_samples
from mindspeed_llm.tasks.preprocess.pretrain_samples import (
    PretrainSamples,
    SampleIndex,
    SequentialSamples,
    plan_epochs,
    samples_per_epoch,
)
from tests.tasks.preprocess.corpora import corpus, megatron_config, tokens_of

_RANDOM = np.random.RandomState(3)
MIXED = _RANDOM.randint(0, 60, size=40).tolist()
# lengths, S, samples, seed, documents used (None: all)
CASES = {
    "within one epoch": (MIXED, 16, 10, 1, None),
    "one epoch": (MIXED, 16, None, 1, None),
    "several epochs": (MIXED, 16, 150, 42, None),
    "little of the last epoch": (MIXED, 16, 80, 7, None),
    "nearly all of the last epoch": (MIXED, 16, 136, 7, None),
    "longer than most documents": (MIXED, 200, 5, 7, None),
    "part of the documents": (MIXED, 16, 60, 7, range(11, 29)),
    "empty documents": ([0, 0, 7, 0], 4, 20, 5, None),
    "empty first and last": ([0, 5, 9, 4, 0], 3, 11, 0, None),
    "mostly empty": ([0, 0, 3, 0, 0, 0, 4, 0], 2, 30, 11, None),
    "documents of one token": ([1] * 30, 4, 20, 5, None),
    "shorter than a sample": ([5], 64, 3, 5, None),
    "one long document": ([1000], 7, 300, 2, None),
    "samples end with documents": ([16, 32, 16, 48, 16], 16, 20, 9, None),
    "no sample asked for": (MIXED, 16, 0, 1, None),
}


def _theirs(tmp_path, lengths, sequence, num_samples, seed, documents, *, extra=True):
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    config = megatron_config(
        random_seed=seed, sequence_length=sequence, split="1,0,0", add_extra_token_to_sequence=extra
    )
    indices = np.arange(documents.start, documents.stop, dtype=np.int32)
    prefix = str(tmp_path / "a")
    return gpt.GPTDataset(IndexedDataset(prefix), prefix, indices, num_samples, Split.train, config)


def _compare(tmp_path, case, *, extra=True):
    """Our samples and theirs, as lists."""
    lengths, sequence, num_samples, seed, documents = CASES[case]
    documents = documents or range(len(lengths))
    reader = corpus(tmp_path / "a", lengths)
    theirs = _theirs(tmp_path, lengths, sequence, num_samples, seed, documents, extra=extra)
    index = SampleIndex.build(reader.lengths, documents, num_samples, sequence, seed, extra_token=extra)
    ours = PretrainSamples(reader, index, extra_token=extra)
    assert index.starts.dtype == theirs.sample_index.dtype and index.shuffle.dtype == theirs.shuffle_index.dtype
    return [ours[i].tolist() for i in range(len(ours))], tokens_of(theirs), num_samples


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_megatron_core(tmp_path, monkeypatch, case, extra):
    monkeypatch.setattr(pretrain_samples, "_BLOCK", 7)  # several blocks
    ours, theirs, num_samples = _compare(tmp_path, case, extra=extra)
    assert ours == theirs
    assert len(ours) >= (num_samples or 0)
    assert {len(row) for row in ours} <= {CASES[case][1] + extra}


def _unshuffled(monkeypatch):
    monkeypatch.setattr(pretrain_samples, "_shuffled", lambda random, items: items)


def _never_apart(monkeypatch):
    plan = pretrain_samples.plan_epochs
    monkeypatch.setattr(pretrain_samples, "plan_epochs", lambda *a, **k: (plan(*a, **k)[0], None))


def _always_apart(monkeypatch):
    monkeypatch.setattr(pretrain_samples, "_SEPARATE_LAST_EPOCH_BELOW", 2.0)


def _starts_off_by_one(monkeypatch):
    starts = pretrain_samples._sample_starts
    monkeypatch.setattr(
        pretrain_samples, "_sample_starts", lambda *a, **k: starts(*a, **k) + np.array([0, 1], np.int32)
    )


@pytest.mark.parametrize(
    ("mutant", "case"),
    [
        (_unshuffled, "within one epoch"),
        (_never_apart, "little of the last epoch"),
        (_always_apart, "nearly all of the last epoch"),
        (_starts_off_by_one, "longer than most documents"),
    ],
)
def test_mutants_differ_from_megatron_core(tmp_path, monkeypatch, mutant, case):
    mutant(monkeypatch)
    try:
        ours, theirs, _ = _compare(tmp_path, case)
    except IndexError:
        return
    assert ours != theirs


def test_epochs_by_hand():
    # 100 tokens, S = 10: 9 samples of one epoch, 19 of two, 29 of three.
    assert plan_epochs(100, 9, 10) == (1, None)
    assert plan_epochs(100, 10, 10) == (2, 9)
    assert plan_epochs(100, 15, 10) == (2, 9)  # 6 of the last epoch, less than int(0.8 * 9) = 7
    assert plan_epochs(100, 16, 10) == (2, None)
    assert plan_epochs(100, 20, 10) == (3, 19)
    # Without the extra token an epoch has 10.
    assert plan_epochs(100, 10, 10, extra_token=False) == (1, None)
    assert plan_epochs(100, None, 10) == (1, None)


def test_no_token_is_lost(tmp_path):
    # One epoch, long and short documents: the samples without their overlap are the documents end to end.
    lengths = [3, 500, 1, 0, 40]
    reader = corpus(tmp_path / "a", lengths)
    index = SampleIndex.build(reader.lengths, range(5), 1, 8, 0)
    samples = PretrainSamples(reader, index)
    joined = np.concatenate([reader[int(d)] for d in index.documents])
    in_order = [samples[i] for i in np.argsort(index.shuffle)]
    assert np.concatenate([sample[:-1] for sample in in_order]).tolist() == joined[: len(samples) * 8].tolist()
    assert len(samples) == samples_per_epoch(544, 8) == 67


def test_sequential_samples_have_every_token_as_target_once(tmp_path):
    reader = corpus(tmp_path / "a", [7, 0, 5, 20, 0, 9])
    samples = SequentialSamples(reader, range(1, 6), 8)
    rows = [samples[i] for i in range(len(samples))]
    assert [len(row) for row in rows] == [9, 9, 9, 9, 2]
    assert np.concatenate([row[1:] for row in rows]).tolist() == list(range(8, 41))
    assert np.concatenate([row[:-1] for row in rows]).tolist() == list(range(7, 40))


def test_no_tokens():
    # megatron-core would look for enough epochs of nothing for ever.
    with pytest.raises(ValueError, match="no tokens"):
        SampleIndex.build(np.zeros(3, dtype=np.int32), range(3), 1, 8, 0)
