"""Streaming: records are read, shuffled in a buffer and tokenized while training, and never kept.

Every rank goes through the same stream and takes the rows that are its own, so a global batch is the same however it is
split; the price is that every rank tokenizes all of it. When the data ends it starts again with another shuffle.
"""

import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.data.naming import naming
from mindspeed_llm.fsdp2.data.order import BatchSplit, DataPosition
from mindspeed_llm.fsdp2.data.sample import Sample, shifted
from mindspeed_llm.fsdp2.data.sources import Batch, Collate, LoaderOptions
from mindspeed_llm.tasks.preprocess.chunks import Summary, Work
from mindspeed_llm.tasks.preprocess.dataset_info import DatasetEntry
from mindspeed_llm.tasks.preprocess.mixing import interleaved
from mindspeed_llm.tasks.preprocess.readers import Record, read_file

_LOG = logging.getLogger("mindspeed_llm")

_Item = tuple[int, Record]


class RecordStream:
    """Samples of several data sets in one endless stream; the first `skip` records are held out for evaluation."""

    def __init__(
        self,
        entries: Sequence[DatasetEntry],
        works: Sequence[Work],
        *,
        strategy: str = "concat",
        probabilities: Sequence[float] | None = None,
        buffer_size: int = 1,
        seed: int = 42,
        skip: int = 0,
    ) -> None:
        self._entries, self._works = entries, works
        self._strategy, self._probabilities = strategy, probabilities
        self._buffer_size, self._seed, self._skip = buffer_size, seed, skip
        self._empty: set[Path] = set()

    def samples(self) -> Iterator[Sample]:
        """Yield samples without end. Raises UserError when a whole pass over the data gives none."""
        for epoch in itertools.count():
            summary = Summary()
            random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((self._seed, epoch))))
            records = itertools.islice(self._mixed(random), self._skip, None)
            with naming("data.dataset"):
                for item in _shuffled(records, self._buffer_size, random):
                    yield from self._tokenized(item, summary)
            for line in (*summary.skip_lines(), *summary.notes()):
                _LOG.warning("stream, pass %d: %s", epoch + 1, line)
            if summary.num_samples == 0:
                reasons = "; ".join(summary.skip_lines()) or "there are no records"
                raise UserError(
                    f"data.dataset: no sample to train on is left of {summary.num_records} streamed records: {reasons}"
                )

    def held_out(self) -> list[Sample]:
        """The samples of the first `skip` records."""
        summary = Summary()
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((self._seed, 0))))
        records = itertools.islice(self._mixed(random), self._skip)
        with naming("data.dataset"):
            samples = [sample for item in records for sample in self._tokenized(item, summary)]
        if not samples:
            raise UserError(f"data.val_size {self._skip}: none of the first {self._skip} records gives a sample")
        return samples

    def _tokenized(self, item: _Item, summary: Summary) -> Iterator[Sample]:
        number, record = item
        chunk = self._works[number]([record])
        summary.add(chunk)
        # Text is its own target.
        arrays = chunk.arrays
        ids, labels = (arrays["text"],) * 2 if "text" in arrays else (arrays["input_ids"], arrays["labels"])
        ends = np.cumsum(chunk.first_lengths)
        for start, end in zip(ends - chunk.first_lengths, ends, strict=True):
            yield Sample(ids[start:end], shifted(labels[start:end]))

    def _records(self, number: int) -> Iterator[_Item]:
        for file in self._entries[number].files:
            is_empty = True
            for record in read_file(file):
                is_empty = False
                yield number, record
            if is_empty and file not in self._empty:
                self._empty.add(file)
                _LOG.warning("data file %s holds no records", file)

    def _mixed(self, random: np.random.RandomState) -> Iterator[_Item]:
        count = len(self._entries)
        opens = [functools.partial(self._records, number) for number in range(count)]
        names = [entry.name for entry in self._entries]
        # A seed of its own, so that the mix does not depend on the draws of the shuffle buffer.
        return interleaved(opens, names, self._strategy, self._probabilities, int(random.randint(1 << 31)))


def _shuffled(items: Iterator[Any], size: int, random: np.random.RandomState) -> Iterator[Any]:
    """Shuffle within a buffer: each item leaves at a random moment after it came in."""
    buffer = list(itertools.islice(items, size))
    for item in items:
        place = random.randint(len(buffer))
        buffer[place], item = item, buffer[place]
        yield item
    random.shuffle(buffer)
    yield from buffer


class StreamTrainSource:
    """Training micro batches from a stream; its length is `max_steps`.

    To start at a later step, what comes before is read and left out: a stream has no places.
    """

    def __init__(
        self,
        stream: RecordStream,
        split: BatchSplit,
        collator: Collate,
        *,
        max_steps: int,
        loader: LoaderOptions | None = None,
        start: DataPosition | None = None,
    ) -> None:
        self.stream, self._split, self._collator = stream, split, collator
        self._max_steps, self._loader = max_steps, loader or LoaderOptions()
        self._start = start or DataPosition()
        self.layouts: tuple[int, ...] = ()
        self.steps_per_epoch = max_steps
        self.num_samples = max_steps * split.global_batch_size

    def total_steps(self, num_train_epochs: float, max_steps: int) -> int:
        """Number of optimizer steps: `max_steps`, which streaming needs."""
        return max_steps

    def micro_batches(self, start_step: int = 0) -> Iterator[list[Batch]]:
        """Yield, for each optimizer step from `start_step` on, the micro batches of this rank."""
        first = max(start_step, self._start.step)
        taken = self._start.samples + (first - self._start.step) * self._split.global_batch_size
        rows = _StreamRows(self.stream, self._split, self._collator, taken, self._max_steps - first)
        arguments = self._loader.arguments()
        if self._loader.num_workers:
            # One process reads ahead; several would have to share the stream out.
            arguments["num_workers"] = 1
            if self._loader.num_workers > 1:
                _LOG.info(
                    "streaming: one loading process is used of dataloader_num_workers %d", self._loader.num_workers
                )
        batches = iter(DataLoader(rows, batch_size=None, **arguments))
        while step_batches := list(itertools.islice(batches, self._split.accumulation)):
            yield step_batches


class _StreamRows(IterableDataset):
    """The micro batches of one rank in `steps` optimizer steps, after `taken` samples."""

    def __init__(self, stream: RecordStream, split: BatchSplit, collator: Collate, taken: int, steps: int) -> None:
        self._stream, self._split, self._collator, self._taken, self._steps = stream, split, collator, taken, steps

    def __iter__(self) -> Iterator[Batch]:
        size = self._split.global_batch_size
        samples = itertools.islice(self._stream.samples(), self._taken, self._taken + self._steps * size)
        for _ in range(self._steps):
            batch = list(itertools.islice(samples, size))
            for micro_step in range(self._split.accumulation):
                yield self._collator([batch[place] for place in self._split.row_positions(0, micro_step)])
