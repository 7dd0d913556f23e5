"""Sources of micro batches: training (optimizer step by optimizer step) and evaluation (every sample once)."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.data.order import FILLER, BatchSplit, DataPosition, EpochOrder, IndexOrder
from mindspeed_llm.fsdp2.data.sample import Sample
from mindspeed_llm.tasks.preprocess.samples import IGNORE_INDEX

Batch = dict[str, Any]


Collate = Callable[[Sequence[Any]], Batch]
"""Rows of a sample set, or None for a row that only fills up -> a micro batch (`Collator`, `PairCollator`)."""


class SampleSet(Protocol):
    """Samples by number, or pairs of them; either has `labels`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class TrainSource(Protocol):
    """What the trainer needs of training data. `num_samples` and `steps_per_epoch` are of one epoch; `layouts` is for
    `DataPosition`.
    """

    num_samples: int
    steps_per_epoch: int
    layouts: tuple[int, ...]

    def total_steps(self, num_train_epochs: float, max_steps: int) -> int: ...

    def micro_batches(self, start_step: int = 0) -> Iterator[list[Batch]]: ...


@dataclass(frozen=True)
class LoaderOptions:
    """The `dataloader_*` fields: processes beside this one, batches each keeps ready, page-locked memory."""

    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    persistent_workers: bool = False

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for torch's DataLoader."""
        arguments: dict[str, Any] = {"num_workers": self.num_workers, "pin_memory": self.pin_memory}
        if self.num_workers:
            arguments |= {"prefetch_factor": self.prefetch_factor, "persistent_workers": self.persistent_workers}
        # A generator of its own: the loader must not draw from the global one, which dropout uses.
        return arguments | {"generator": torch.Generator()}


class _Rows(Dataset):
    """A sample set in which FILLER stands for no sample."""

    def __init__(self, samples: SampleSet) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample | None:
        return None if index == FILLER else self._samples[index]


class MapTrainSource:
    """Training micro batches from samples that can be had by number; the position is found by arithmetic.

    `num_train_epochs` and `max_steps` say how far the data goes: `max_steps` > 0 repeats epochs as needed; else the
    last global batch is filled up with rows that do not count, or left out with `drop_last`. Raises UserError when that
    leaves no step.
    """

    def __init__(
        self,
        samples: SampleSet,
        order: EpochOrder | IndexOrder,
        split: BatchSplit,
        collator: Collate,
        *,
        num_train_epochs: float,
        max_steps: int,
        drop_last: bool = False,
        loader: LoaderOptions | None = None,
        start: DataPosition | None = None,
        layouts: tuple[int, ...] = (),
    ) -> None:
        _require_target(samples, len(samples), "training")
        self._samples, self._order, self._split, self._collator = samples, order, split, collator
        self._drop_last, self._loader = drop_last, loader or LoaderOptions()
        self._start = start or DataPosition()
        self.layouts = layouts
        self.num_samples = order.num_samples
        self.steps_per_epoch = max(1, self._steps(self.num_samples))
        self._num_steps = self.total_steps(num_train_epochs, max_steps)
        if max_steps > 0:
            steps_left = self._num_steps - self._start.step
            self._num_positions = self._start.samples + steps_left * split.global_batch_size
        else:
            self._num_positions = _num_positions(self.num_samples, num_train_epochs)

    def _steps(self, num_positions: int) -> int:
        whole, rest = divmod(num_positions, self._split.global_batch_size)
        return whole + (rest > 0 and not self._drop_last)

    def total_steps(self, num_train_epochs: float, max_steps: int) -> int:
        """Number of optimizer steps."""
        if max_steps > 0:
            return max_steps
        left = max(_num_positions(self.num_samples, num_train_epochs) - self._start.samples, 0)
        steps = self._start.step + self._steps(left)
        if steps < 1:
            raise UserError(
                f"{self.num_samples} samples for training.num_train_epochs {num_train_epochs:g} make no step of global "
                f"batch size {self._split.global_batch_size}"
                + (" with training.dataloader_drop_last" if self._drop_last else "")
                + "; use more data, more epochs, a smaller batch, or training.max_steps"
            )
        return steps

    def micro_batches(self, start_step: int = 0) -> Iterator[list[Batch]]:
        """Yield, for each optimizer step from `start_step` on, the micro batches of this rank.

        Steps before the one that the source was made to start at have another global batch and cannot be had.
        """
        offset = self._start.samples - self._start.step * self._split.global_batch_size
        rows = (
            row
            for step in range(max(start_step, self._start.step), self._num_steps)
            for row in self._split.rows(self._order, offset + step * self._split.global_batch_size, self._num_positions)
        )
        loader: DataLoader[Sample | None] = DataLoader(
            _Rows(self._samples), batch_sampler=rows, collate_fn=self._collator, **self._loader.arguments()
        )
        batches = iter(loader)
        while step_batches := list(itertools.islice(batches, self._split.accumulation)):
            yield step_batches


class EvalSource:
    """Evaluation micro batches: every sample exactly once, the same number of micro batches on every rank."""

    def __init__(
        self,
        samples: SampleSet,
        collator: Collate,
        *,
        rank: int,
        num_ranks: int,
        micro_batch_size: int,
        max_samples: int | None = None,
    ) -> None:
        self._samples, self._collator = samples, collator
        self._rank, self._num_ranks, self._rows = rank, num_ranks, micro_batch_size
        self.num_samples = len(samples) if max_samples is None else min(max_samples, len(samples))
        _require_target(samples, self.num_samples, "evaluation")

    def __len__(self) -> int:
        """Number of micro batches of each rank."""
        return math.ceil(self.num_samples / (self._num_ranks * self._rows))

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's micro batches; rows beyond the last sample are fillers."""
        samples = _Rows(self._samples)
        for step in range(len(self)):
            first = (step * self._num_ranks + self._rank) * self._rows
            indices: Sequence[int] = range(first, first + self._rows)
            yield self._collator([samples[i] if i < self.num_samples else None for i in indices])

    def texts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ids and labels of each sample, labels not shifted; of a pair, of its chosen side."""
        for index in range(self.num_samples):
            yield self._samples[index].text()


def _require_target(samples: SampleSet, count: int, purpose: str) -> None:
    """Raise UserError when none of the first `count` samples has a target. As a rule the first one has."""
    if not any(np.any(samples[index].labels != IGNORE_INDEX) for index in range(count)):
        raise UserError(
            f"no token of the {purpose} data has a target, so there is no loss: raise data.cutoff_len, or give other "
            f"data ({'data.dataset' if purpose == 'training' else 'data.eval_dataset'})"
        )


def _num_positions(num_samples: int, num_train_epochs: float) -> int:
    # Rounded down, but not by the last bit of a product such as 10 * 0.3.
    return math.floor(num_samples * num_train_epochs + 1e-6)
