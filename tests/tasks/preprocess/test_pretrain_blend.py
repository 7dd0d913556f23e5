"""Blended pretraining samples against megatron-core's builder: prefixes, weights, splits and numbers of samples."""

import logging

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import pretrain_blend
from mindspeed_llm.tasks.preprocess.index_cache import IndexCache
from mindspeed_llm.tasks.preprocess.pretrain_blend import PretrainLayout, PretrainSource, pretrain_samples
from mindspeed_llm.tasks.preprocess.splits import split_documents
from tests.tasks.preprocess.corpora import corpus, megatron_splits, tokens_of

_RANDOM = np.random.RandomState(5)
FILES = {
    "a": _RANDOM.randint(0, 60, size=90).tolist(),
    "b": [0, *_RANDOM.randint(1, 9, size=200).tolist(), 0],
    "c": _RANDOM.randint(50, 400, size=30).tolist(),
}
SEQUENCE, SEED = 16, 7
_TOTAL = sum((sum(FILES[name]) - 1) // SEQUENCE for name in "bc")


@pytest.fixture
def readers(tmp_path):
    firsts = dict(zip(FILES, (0, 100_000, 200_000), strict=True))
    return {name: corpus(tmp_path / name, lengths, firsts[name]) for name, lengths in FILES.items()}


def _build(readers, names, weights, documents, num_samples, *, extra=True, seed=SEED):
    sources = [PretrainSource(readers[name], part) for name, part in zip(names, documents, strict=True)]
    layout = PretrainLayout(sequence_length=SEQUENCE, seed=seed, extra_token=extra)
    rows = pretrain_samples(sources, weights, num_samples, layout, IndexCache())
    return [rows[i].tolist() for i in range(len(rows))]


def _ours(readers, names, weights, split, sizes, *, extra=True, seed=SEED):
    """Train, valid and test; None where the split has no share for it."""
    parts = [split_documents(len(readers[name]), split) for name in names]
    shares = [float(share) for share in split.split(",")]
    return [
        _build(readers, names, weights, [part[i] for part in parts], sizes[i], extra=extra, seed=seed)
        if shares[i]
        else None
        for i in range(3)
    ]


def _theirs(tmp_path, names, weights, split, sizes, *, extra=True):
    blend = ([str(tmp_path / name) for name in names], weights)
    splits = megatron_splits(
        sizes,
        blend=blend,
        split=split,
        random_seed=SEED,
        sequence_length=SEQUENCE,
        add_extra_token_to_sequence=extra,
    )
    return [None if part is None else tokens_of(part) for part in splits]


# names, weights, split, samples of train, valid and test
CASES = {
    "one file": ("a", None, "98,1,1", (300, 4, 2)),
    "one file, one epoch": ("c", None, "90,10,0", (None, None, None)),
    "one file with a weight": ("a", [1.0], "1,0,0", (200, 0, 0)),
    "weights": ("abc", [0.3, 0.5, 0.2], "80,10,10", (500, 40, 30)),
    "weights that are no shares": ("ab", [30.0, 70.0], "969,31,0", (200, 10, 0)),
    "thirds": ("abc", [1 / 3, 1 / 3, 1 / 3], "1,0,0", (99, 0, 0)),
    "far apart": ("ab", [0.001, 0.999], "1,0,0", (1000, 0, 0)),
    "by size, all": ("abc", None, "80,10,10", (None, None, None)),
    "by size, part": ("abc", None, "80,10,10", (100, 3, None)),
    "by size, exactly all": ("cb", None, "1,0,0", (_TOTAL, 0, 0)),
    "one file twice": ("aa", [0.5, 0.5], "1,0,0", (150, 0, 0)),
    "one file twice by size": ("aba", None, "50,50,0", (None, None, None)),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_to_megatron_core(tmp_path, readers, case):
    names, weights, split, sizes = CASES[case]
    for extra in (True, False) if case in ("one file", "weights", "by size, all") else (True,):
        ours = _ours(readers, names, weights, split, sizes, extra=extra)
        assert ours == _theirs(tmp_path, names, weights, split, sizes, extra=extra)
        assert ours[0]


def test_a_blend_for_each_split(tmp_path, readers):
    # --train-data-path, --valid-data-path and --test-data-path: whole files, a single one without its weight.
    blends = [(["a", "b"], [0.4, 0.6]), (["c"], [1.0]), (["b", "c"], None)]
    sizes = (400, 50, None)
    theirs = megatron_splits(
        sizes,
        blend_per_split=[([str(tmp_path / name) for name in names], weights) for names, weights in blends],
        random_seed=SEED,
        sequence_length=SEQUENCE,
    )
    for (names, weights), number, part in zip(blends, sizes, theirs, strict=True):
        everything = [range(len(readers[name])) for name in names]
        weights = weights if len(names) > 1 else None
        assert _build(readers, names, weights, everything, number) == tokens_of(part)


def test_mutants_differ_from_megatron_core(tmp_path, readers, monkeypatch):
    for case, attribute, value in (
        ("weights", "_SURPLUS", 0.9),
        ("weights that are no shares", "normalized", lambda weights: np.array([0.5, 0.5])),
        ("by size, all", "samples_per_epoch", lambda count, length, **_: count // length // 2),
    ):
        names, weights, split, sizes = CASES[case]
        theirs = _theirs(tmp_path, names, weights, split, sizes)
        with monkeypatch.context() as patch:
            patch.setattr(pretrain_blend, attribute, value)
            assert _ours(readers, names, weights, split, sizes) != theirs, case
    names, weights, split, sizes = CASES["weights"]
    assert _ours(readers, names, weights, split, sizes, seed=SEED + 1) != _theirs(
        tmp_path, names, weights, split, sizes
    )


def test_rare_data_over_many_epochs(tmp_path):
    readers = {"rare": corpus(tmp_path / "rare", [33]), "common": corpus(tmp_path / "common", [17] * 30, first=1000)}
    documents = [range(1), range(30)]

    def blend(num_samples, seed=SEED):
        return _build(readers, ["rare", "common"], [0.001, 0.999], documents, num_samples, seed=seed)

    for num_samples, rare in ((1, 1), (1000, 1), (3000, 3), (3001, 4)):
        rows = blend(num_samples)
        # Each share is rounded up: 4 + 2998 for 3001.
        assert len(rows) == rare + -(-num_samples * 999 // 1000)
        assert sum(row[0] < 1000 for row in rows) == rare
    assert blend(3000) == blend(3000) != blend(3000, seed=8)


def test_shares_that_are_rounded_up(tmp_path):
    # 1 of each rare file and 9 of the common one are 29 places, of which the common one takes 26: more than the 10
    # that are laid out for 9. megatron-core stops with an IndexError.
    readers = {"rare": corpus(tmp_path / "rare", [33]), "common": corpus(tmp_path / "common", [161], first=1000)}
    names, weights = ["common", *["rare"] * 20], [0.9, *[0.005] * 20]
    rows = _build(readers, names, weights, [range(1)] * 21, 10)
    assert (len(rows), sum(row[0] >= 1000 for row in rows)) == (29, 26)
    with pytest.raises(IndexError, match="oversamples"):
        _theirs(tmp_path, names, weights, "1,0,0", (10, 0, 0))


def test_a_weight_of_zero_leaves_a_file_out(readers):
    with_zero = _build(readers, "abc", [0.5, 0.0, 0.5], [range(90), range(0), range(30)], 100)
    assert with_zero == _build(readers, "ac", [0.5, 0.5], [range(90), range(30)], 100)


def test_by_size_beyond_an_epoch(tmp_path):
    # Samples are numbered by their first token; every sample comes once an epoch of its file, and in proportion.
    readers = {"a": corpus(tmp_path / "a", [17] * 10), "b": corpus(tmp_path / "b", [17] * 31, first=1000)}
    documents = [range(10), range(31)]
    one = _build(readers, "ab", None, documents, None)
    assert len(one) == 10 + 32
    three = _build(readers, "ab", None, documents, 3 * len(one))
    assert [sum(row[0] < 1000 for row in rows) for rows in (one, three)] == [10, 30]
    # megatron-core gives an epoch, whatever is asked for.
    assert len(_theirs(tmp_path, "ab", None, "1,0,0", (3 * len(one), 0, 0))[0]) == len(one)


def test_a_short_file_is_left_out_by_size(tmp_path, caplog):
    caplog.set_level(logging.INFO, "mindspeed_llm")
    readers = {"a": corpus(tmp_path / "a", [100]), "short": corpus(tmp_path / "short", [16])}
    assert len(_build(readers, ["short", "a"], None, [range(1), range(1)], None)) == 6
    assert "short is shorter than a sample and left out" in caplog.text


def test_mistakes(tmp_path, readers):
    with pytest.raises(UserError, match=r"a has weight 0\.5, but its 0 documents of this split hold no tokens"):
        _build(readers, "ab", [0.5, 0.5], [range(0), range(5)], 10)
    with pytest.raises(UserError, match="weights need a number of samples"):
        _build(readers, "ab", [0.5, 0.5], [range(5), range(5)], None)
    with pytest.raises(UserError, match="0 tokens are no sample of 16 tokens"):
        _build(readers, "ab", None, [range(0), range(0)], None)
