"""Samples of the flags against those of megatron-core's builder for the same flags."""

import logging
import shlex

import numpy as np
import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.training.data import datasets
from mindspeed_llm.training.data.datasets import Progress, build_datasets
from mindspeed_llm.training.data.iterator import eval_batches, train_batches
from tests.support.tokenizers import byte_tokenizer
from tests.training.data.helpers import PAD, MegatronTokenizer, arguments, documents, megatron_datasets, save_tokenizer

_RANDOM = np.random.RandomState(5)
FILES = {
    "a": _RANDOM.randint(0, 60, size=90).tolist(),
    "b": [0, *_RANDOM.randint(1, 9, size=300).tolist(), 0],
    "c": _RANDOM.randint(50, 400, size=30).tolist(),
}
# 10 steps of 8; a validation of 2 steps after 4 and 8 and at the end; a test of 2 steps.
SIZES = (80, 48, 16)
# The flags; names of files stand for their prefixes.
CASES = {
    "one file": "--data-path a --split 80,10,10",
    "one file, all of it to train": "--data-path c --split 100,0,0",
    "one file with a weight": "--data-path 1.0 c --split 80,15,5",
    "weights": "--data-path 0.3 a 0.5 b 0.2 c --split 80,10,10",
    "weights that are no shares": "--data-path 30 a 70 c --split 60,40",
    "a split with blanks": "--data-path 2 a 1 c --split '70, 20, 10'",
    "a file each": "--train-data-path a --valid-data-path b --test-data-path c",
    "blends each": "--train-data-path 1 a 2 b --valid-data-path 0.5 c --test-data-path 9 c 1 a",
    "no test": "--train-data-path 0.5 a 0.5 c --valid-data-path b",
    "several epochs": "--data-path a --split 80,10,10 --train-iters 60",
    "samples, not steps": "--data-path a --split 80,10,10 --train-samples 87",
    "documents are isolated": "--data-path 0.6 a 0.4 b --split 80,10,10 --reset-attention-mask",
    "everything is reset": "--data-path 0.6 a 0.4 b --split 80,10,10 --reset-attention-mask --reset-position-ids "
    "--eod-mask-loss",
    "no loss at the ends": "--data-path b --split 80,10,10 --eod-mask-loss",
}


@pytest.fixture
def files(tmp_path):
    for seed, (name, lengths) in enumerate(FILES.items()):
        documents(tmp_path / name, lengths, seed=seed)
    save_tokenizer(tmp_path / "tokenizer")
    return tmp_path


def _arguments(folder, line, **changes):
    words = [str(folder / word) if word in FILES else word for word in shlex.split(line)]
    return arguments(*words, "--tokenizer-name-or-path", folder / "tokenizer", **changes)


def _rows(dataset, args):
    """Every sample as lists, through the batches of one rank."""
    batches = list(train_batches(dataset, args, rank=0, size=1, consumed=0))
    return [{name: batch[name][i].tolist() for name in batch} for batch in batches for i in range(len(batch["tokens"]))]


def _same(ours, theirs):
    """Compare all samples but those behind the last whole batch; `documents` by the attention that they allow."""
    args = arguments(global_batch_size=1, micro_batch_size=1)
    assert len(ours.rows) == len(theirs)
    for own, item in zip(_rows(ours, args), (theirs[i] for i in range(len(theirs))), strict=True):
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert own[name] == item[name].tolist(), name
        if "documents" in own:
            number = torch.tensor(own["documents"])
            sees = (number[:, None] == number[None, :]).tril()
            assert torch.equal(~sees, item["attention_mask"][0])


@pytest.mark.parametrize("case", CASES)
def test_equal_to_megatron_core(files, case):
    args = _arguments(files, CASES[case])
    sizes = {"several epochs": (480, 256, 16), "samples, not steps": (87, 48, 16)}.get(case, SIZES)
    theirs = megatron_datasets(args, sizes, attention_mask=args.reset_attention_mask)
    found = build_datasets(args)
    assert found.layouts == sizes[:1]
    for ours, their in zip((found.train, found.valid, found.test), theirs, strict=True):
        assert (ours is None) == (their is None)
        if their is not None:
            _same(ours, their)
    assert ("documents" in _rows(found.train, args)[0]) == args.reset_attention_mask


def test_equal_to_megatron_core_by_size(files):
    # Without weights megatron-core gives an epoch at most; its flags are the same for one file less than an epoch.
    args = _arguments(files, "--data-path a b c --split 80,10,10 --train-iters 30 --eval-iters 1 --eval-interval 30")
    theirs = megatron_datasets(args, (240, 16, 8))
    found = build_datasets(args)
    for ours, their in zip((found.train, found.valid, found.test), theirs, strict=True):
        _same(ours, their)


def test_padding_is_no_target(files):
    lengths = [9, 30, 22, 40, 17] * 4
    documents(files / "padded", lengths, seed=3, eod=PAD)
    save_tokenizer(files / "padding", pad_token="<pad>")
    args = arguments("--data-path", files / "padded", "--split", "1,0,0", "--tokenizer-name-or-path", files / "padding")
    [theirs, _, _] = megatron_datasets(args, (80, 0, 0), tokenizer=MegatronTokenizer(pad=PAD))
    rows = _rows(build_datasets(args).train, args)
    assert len(rows) == 88 and any(PAD in row["labels"] for row in rows)
    for own, item in zip(rows, (theirs[i] for i in range(88)), strict=True):
        assert own["loss_mask"] == item["loss_mask"].tolist()
        # megatron-core puts 0 in its place.
        assert [0 if token == PAD else token for token in own["tokens"]] == item["tokens"].tolist()


def test_a_pad_token_that_ends_documents_is_a_target(files):
    save_tokenizer(files / "shared", pad_token="</s>")
    args = _arguments(files, "--data-path a --split 1,0,0", tokenizer_name_or_path=str(files / "shared"))
    assert all(set(row["loss_mask"]) == {1.0} for row in _rows(build_datasets(args).train, args))


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_mock_data_equal_megatron_core(tmp_path, with_tokenizer):
    args = arguments("--mock-data", "--seq-length", 700, "--reset-position-ids", "--eod-mask-loss")
    tokenizer = MegatronTokenizer(eod=299)
    if with_tokenizer:
        args.tokenizer_name_or_path = str(save_tokenizer(tmp_path / "tokenizer"))
        tokenizer = MegatronTokenizer(vocab_size=258)
    theirs = megatron_datasets(args, SIZES, tokenizer=tokenizer, mock=True)
    found = build_datasets(args)
    for ours, their, size in zip((found.train, found.valid, found.test), theirs, SIZES, strict=True):
        assert len(ours.rows) == len(their) >= size
        batch = next(train_batches(ours, args, rank=3, size=4, consumed=8))
        for i in range(2):
            item = their[8 + 6 + i]
            assert all(torch.equal(batch[name][i], item[name]) for name in batch)
    args.eval_iters = 0
    assert build_datasets(args).valid is None


def test_mock_data_depend_on_the_seed():
    first, again, other = (
        build_datasets(arguments("--mock-data", seed=seed)).train.rows[0].tolist() for seed in (1, 1, 2)
    )
    assert first == again != other


def test_mutants_differ_from_megatron_core(files, monkeypatch):
    args = _arguments(files, CASES["weights"])
    theirs = megatron_datasets(args, SIZES)
    layout = datasets.PretrainLayout
    for attribute, mutant in (
        ("PretrainLayout", lambda **fields: layout(**{**fields, "seed": fields["seed"] + 1})),
        ("num_samples", lambda args: {"train": 81, "valid": 48, "test": 16}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(datasets, attribute, mutant)
            with pytest.raises(AssertionError):
                _same(build_datasets(args).train, theirs[0])


def _tokens(dataset, positions):
    return [dataset.rows[i].tolist() for i in positions]


def test_a_longer_run_keeps_the_samples_that_it_began_with(files):
    line = "--data-path 0.3 a 0.7 c --split 80,10,10"
    begun = build_datasets(_arguments(files, line))
    # 5 of 10 steps are done when it goes on with 100 steps of 12 samples: several epochs, which are shuffled together.
    longer = _arguments(files, line, train_iters=100, global_batch_size=12)
    assert _tokens(build_datasets(longer).train, range(80)) != _tokens(begun.train, range(80))
    resumed = build_datasets(longer, progress=Progress(iteration=5, consumed_samples=40, layouts=begun.layouts))
    assert resumed.layouts == (80, 40 + 95 * 12 - 80) and len(resumed.train.rows) >= 1180
    assert _tokens(resumed.train, range(80)) == _tokens(begun.train, range(80))
    again = build_datasets(longer, progress=Progress(iteration=20, consumed_samples=220, layouts=resumed.layouts))
    assert again.layouts == resumed.layouts
    assert _tokens(again.train, range(1180)) == _tokens(resumed.train, range(1180))


def test_progress_without_layouts_is_megatrons_rule(files):
    args = _arguments(files, "--data-path a --split 80,10,10")
    progress = Progress(iteration=5, consumed_samples=40)
    assert build_datasets(args, progress=progress).layouts == (80,)
    # 4 steps of 8 were done, 6 of 16 are to come.
    args.global_batch_size = 16
    assert build_datasets(args, progress=Progress(iteration=4, consumed_samples=32)).layouts == (160,)
    args.train_samples = 100
    assert build_datasets(args, progress=Progress(iteration=4, consumed_samples=32, layouts=(70,))).layouts == (70, 30)


def test_parts_without_a_share_and_without_evaluation(files, caplog):
    caplog.set_level(logging.INFO, "mindspeed_llm")
    found = build_datasets(_arguments(files, "--data-path a --split 100,0,0"))
    assert found.valid is None and found.test is None
    assert build_datasets(_arguments(files, "--data-path a --split 1,1,1", eval_iters=0)).valid is None
    # The default of --split is nobody's wish: 3 % of 30 documents are one, 0.1 % none.
    found = build_datasets(_arguments(files, "--data-path c"))
    assert found.valid is not None and found.test is None
    assert "no test: --split 969,30,1 leaves no document of" in caplog.text


def test_the_index_lies_where_the_flag_says(files, tmp_path):
    args = _arguments(files, "--data-path a --split 80,10,10", data_cache_path=str(tmp_path / "elsewhere"))
    build_datasets(args)
    assert len(list((tmp_path / "elsewhere").glob("a_*.json"))) == 3 and not (files / "cache").exists()
    # Data that cannot be written to, and a folder for checkpoints.
    (files / "cache").write_text("in the way")
    args = _arguments(files, "--data-path a --split 80,10,10", save=str(tmp_path / "run"))
    build_datasets(args)
    assert len(list((tmp_path / "run" / "dataset_cache").glob("a_*.json"))) == 3
    args.save = None
    with pytest.raises(UserError, match="the sample index cannot be written"):
        build_datasets(args)


def test_evaluation_goes_on_and_begins_again(files):
    args = _arguments(files, "--data-path a --split 80,10,10")
    valid = build_datasets(args).valid
    batches = eval_batches(valid, args, rank=0, size=1, consumed=0)
    read = [row for _ in range(28) for row in next(batches)["tokens"].tolist()]
    samples = [row[:-1] for row in _tokens(valid, range(len(valid.rows)))]
    assert len(samples) == 49 and read == samples + samples[:7]


def test_tokenizer_that_is_given(files):
    args = _arguments(files, "--data-path a --split 1,0,0 --reset-position-ids", tokenizer_name_or_path=None)
    with pytest.raises(UserError, match="--reset-position-ids: the token that ends documents is not known"):
        build_datasets(args)
    from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer

    assert build_datasets(args, as_tokenizer(byte_tokenizer())).train.rules.eod_id == 257
