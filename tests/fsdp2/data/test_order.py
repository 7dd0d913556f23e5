"""The order of samples, and the split of a global batch over ranks, micro batches and accumulation."""

import itertools

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.data.order import FILLER, BatchSplit, EpochOrder
from mindspeed_llm.fsdp2.data.sample import Collator, Sample
from mindspeed_llm.fsdp2.data.sources import EvalSource, LoaderOptions, MapTrainSource

SPLITS = [(1, 8, 1), (1, 2, 4), (2, 2, 2), (4, 1, 2)]


class Numbers:
    """Sample i is i + 1 tokens of value i, each its own target."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return Sample(np.full(index + 1, index), np.full(index + 1, index))


def _source(size, split, *, epochs=1.0, max_steps=-1, drop_last=False, seed=42, shuffle=True, loader=None):
    return MapTrainSource(
        Numbers(size),
        EpochOrder(size, seed=seed, shuffle=shuffle),
        split,
        Collator(pad_token_id=0),
        num_train_epochs=epochs,
        max_steps=max_steps,
        drop_last=drop_last,
        loader=loader,
    )


def _samples(batch):
    """The samples of a micro batch, in row order; None for a filler."""
    return [int(labels[0]) if labels[0] != -100 else None for labels in batch["labels"].tolist()]


def _steps(source, start=0):
    return [[_samples(batch) for batch in step] for step in source.micro_batches(start)]


def test_positions_by_hand():
    split = BatchSplit(rank=1, num_ranks=2, micro_batch_size=3, accumulation=2)
    assert split.global_batch_size == 12
    assert [list(split.row_positions(split.global_batch_size, m)) for m in (0, 1)] == [[15, 16, 17], [21, 22, 23]]


def test_every_epoch_is_a_permutation_of_its_own():
    order = EpochOrder(10, seed=1, shuffle=True)
    epochs = [[order[epoch * 10 + i] for i in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert order[3] == epochs[0][3]  # also out of order
    assert [EpochOrder(10, seed=2, shuffle=True)[i] for i in range(10)] != epochs[0]
    assert [EpochOrder(4, seed=2, shuffle=False)[i] for i in range(6)] == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("size", [21, 5])
def test_global_batches_do_not_depend_on_the_split(size):
    runs = []
    for ranks, rows, accumulation in SPLITS:
        splits = [BatchSplit(r, ranks, rows, accumulation) for r in range(ranks)]
        per_rank = [_steps(_source(size, split, epochs=1.5)) for split in splits]
        # In the order of positions: micro step, rank, row.
        runs.append(
            [
                [sample for micro in zip(*step, strict=True) for rank in micro for sample in rank]
                for step in zip(*per_rank, strict=True)
            ]
        )
    assert all(run == runs[0] for run in runs)
    order = EpochOrder(size, seed=42, shuffle=True)
    count = int(size * 1.5)
    expected = [order[i] for i in range(count)] + [None] * (-count % 8)
    assert list(itertools.chain.from_iterable(runs[0])) == expected


def test_fillers_do_not_count():
    (step,) = _source(3, BatchSplit(0, 1, 2, 2)).micro_batches()
    first, last = step
    assert (first["num_samples"], last["num_samples"]) == (2, 1)
    only_fillers = next(_source(1, BatchSplit(1, 2, 1, 1)).micro_batches())[0]
    assert (only_fillers["num_samples"], only_fillers["num_tokens"]) == (0, 0)
    assert (only_fillers["labels"] == -100).all()
    # One token is visible, so that attention has something to look at.
    assert only_fillers["attention_mask"].sum() == 1


@pytest.mark.parametrize(
    ("epochs", "max_steps", "drop_last", "steps"),
    [(1.0, -1, False, 3), (1.0, -1, True, 2), (2.0, -1, False, 5), (0.5, -1, False, 2), (0.1, -1, False, 1),
     (3.0, 7, False, 7), (0.3, 7, True, 7)],
)  # fmt: skip
def test_number_of_steps(epochs, max_steps, drop_last, steps):
    source = _source(10, BatchSplit(0, 1, 4, 1), epochs=epochs, max_steps=max_steps, drop_last=drop_last)
    assert source.total_steps(epochs, max_steps) == steps == len(_steps(source))
    assert source.steps_per_epoch == (2 if drop_last else 3) and source.num_samples == 10


def test_max_steps_repeats_epochs_without_fillers():
    samples = list(itertools.chain.from_iterable(itertools.chain.from_iterable(
        _steps(_source(5, BatchSplit(0, 1, 4, 1), max_steps=5))
    )))  # fmt: skip
    assert [sorted(samples[i : i + 5]) for i in range(0, 20, 5)] == [list(range(5))] * 4


def test_too_few_samples_for_a_step():
    with pytest.raises(
        UserError, match=r"3 samples for training\.num_train_epochs 1 make no step of global batch size 4"
    ):
        _source(3, BatchSplit(0, 1, 4, 1), drop_last=True)
    with pytest.raises(UserError, match="make no step"):
        _source(3, BatchSplit(0, 1, 4, 1), epochs=0.1)


@pytest.mark.parametrize("workers", [0, 2])
def test_start_in_the_middle(workers):
    loader = LoaderOptions(num_workers=workers, prefetch_factor=2 if workers else None)
    source = _source(23, BatchSplit(1, 2, 2, 2), epochs=3, loader=loader)
    assert _steps(source, 4) == _steps(source)[4:] == _steps(_source(23, BatchSplit(1, 2, 2, 2), epochs=3))[4:]


def test_loading_leaves_the_global_generator_alone():
    import torch

    before = torch.random.get_rng_state()
    _steps(_source(9, BatchSplit(0, 1, 2, 1)))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("limit", [None, 6])
def test_evaluation_sees_every_sample_once(ranks, limit):
    sources = [
        EvalSource(
            Numbers(11), Collator(pad_token_id=0), rank=r, num_ranks=ranks, micro_batch_size=2, max_samples=limit
        )
        for r in range(ranks)
    ]
    batches = [list(source.batches()) for source in sources]
    assert {len(part) for part in batches} == {len(sources[0])}
    seen = [s for part in batches for batch in part for s in _samples(batch) if s is not None]
    assert sorted(seen) == list(range(limit or 11))
    assert FILLER not in seen
