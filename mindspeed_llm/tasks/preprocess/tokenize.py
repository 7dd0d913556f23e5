"""Records -> token ids, in chunks, in order, on one or several processes; skipped records are counted by reason.

A `Work` turns a chunk of records into arrays. It is sent to the worker processes once; chunks travel to them and arrays
come back, in the order of the input whatever the number of workers.
"""

import itertools
import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.readers import Record, read_file
from mindspeed_llm.tasks.preprocess.records import UnusableRecord, missing_column, to_conversation
from mindspeed_llm.tasks.preprocess.render import Renderer
from mindspeed_llm.tasks.preprocess.samples import SampleOptions, build_sample

_LOG = logging.getLogger("mindspeed_llm")
_SECONDS_BETWEEN_LINES = 10.0
_FIRST_LINES_KEPT = 3

EMPTY_TEXT = "empty text"


@dataclass
class Chunk:
    """Token arrays of some records: `arrays[key]` holds all sequences end to end, `lengths` the length of each."""

    arrays: dict[str, np.ndarray]
    lengths: np.ndarray
    num_records: int
    skipped: list[tuple[str, str]] = field(default_factory=list)


class Work(Protocol):
    """Turns records into a chunk; `keys` names the arrays it makes."""

    keys: tuple[str, ...]

    def __call__(self, records: Sequence[Record]) -> Chunk: ...


@dataclass
class Summary:
    """What became of the records: how many were read, written and skipped, by reason with the first places."""

    num_records: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    first_skipped: dict[str, list[str]] = field(default_factory=dict)

    def add(self, chunk: Chunk) -> None:
        """Count a chunk in."""
        self.num_records += chunk.num_records
        self.num_samples += len(chunk.lengths)
        self.num_tokens += int(chunk.lengths.sum())
        for reason, where in chunk.skipped:
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
            places = self.first_skipped.setdefault(reason, [])
            if len(places) < _FIRST_LINES_KEPT:
                places.append(where)

    def skip_lines(self) -> list[str]:
        """One line per reason, with the first places."""
        return [
            f"{count} records skipped: {reason} (first at {', '.join(self.first_skipped[reason])})"
            for reason, count in self.skipped.items()
        ]


class ConversationWork:
    """Records of conversations -> input_ids and labels, one sample per record."""

    keys: tuple[str, ...] = ("input_ids", "labels")

    def __init__(
        self,
        renderer: Renderer,
        options: SampleOptions,
        formatting: str,
        columns: Mapping[str, str | None],
        tags: Mapping[str, str | None],
    ) -> None:
        self._renderer, self._options = renderer, options
        self._formatting, self._columns, self._tags = formatting, columns, tags

    def sample(self, record: Record) -> tuple[np.ndarray, np.ndarray]:
        """(ids, labels) of one record; raises UnusableRecord, or UserError naming file and line."""
        try:
            conversation = to_conversation(record, self._formatting, self._columns, self._tags)
            turns = self._renderer.turns(conversation)
        except UserError as error:
            raise error if record.where in str(error) else UserError(f"{record.where}: {error}") from error
        return build_sample(turns, self._options, self._renderer.efficient_eos_id)

    def __call__(self, records: Sequence[Record]) -> Chunk:
        ids, labels, skipped = [], [], []
        for record in records:
            try:
                sample = self.sample(record)
            except UnusableRecord as reason:
                skipped.append((str(reason), record.where))
                continue
            ids.append(sample[0])
            labels.append(sample[1])
        arrays = {"input_ids": _end_to_end(ids), "labels": _end_to_end(labels)}
        return Chunk(arrays, np.array([len(item) for item in ids], dtype=np.int32), len(records), skipped)


class TextWork:
    """Records of text -> ids of whole documents (key `text`), with the tokenizer's own begin token where it adds one.

    `append_eod` adds the eos token to each document, unless the tokenizer has done so. With `piece_length` documents
    are split in pieces of at most that many tokens.
    """

    keys: tuple[str, ...] = ("text",)

    def __init__(
        self, tokenizer: Any, *, column: str = "text", append_eod: bool = False, piece_length: int | None = None
    ) -> None:
        self._tokenizer, self._column, self._piece_length = tokenizer, column, piece_length
        self._eod = tokenizer.eos_token_id if append_eod else None
        if append_eod and self._eod is None:
            raise UserError("data.append_eod is true, but the tokenizer has no eos token to append")

    def __call__(self, records: Sequence[Record]) -> Chunk:
        texts, skipped = [], []
        for record in records:
            text = text_of(record, self._column)
            if text.strip():
                texts.append(text)
            else:
                skipped.append((EMPTY_TEXT, record.where))
        documents = self._tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"] if texts else []
        if self._eod is not None:
            documents = [ids if ids and ids[-1] == self._eod else [*ids, self._eod] for ids in documents]
        lengths = np.array([len(ids) for ids in documents], dtype=np.int32)
        if self._piece_length is not None:
            lengths = _piece_lengths(lengths, self._piece_length)
        return Chunk({"text": _end_to_end(documents)}, lengths, len(records), skipped)


def text_of(record: Record, column: str) -> str:
    """The text of a record; raises UserError when the column is missing or holds something else."""
    if column not in record.data:
        raise missing_column(record, "text", column)
    text = record.data[column]
    if not isinstance(text, str):
        shown = "null" if text is None else type(text).__name__
        raise UserError(f"{record.where}: key {column!r}: expected text, found {shown}")
    return text


def tokenize_files(
    files: Iterable[Path],
    work: Work,
    summary: Summary,
    *,
    num_workers: int | None = None,
    batch_size: int = 1000,
    max_records: int | None = None,
    name: str = "records",
) -> Iterator[Chunk]:
    """Yield the chunks of all records in order, keeping `summary` up to date and logging the speed.

    A file without any record raises UserError naming it. `num_workers` None or 1 works in this process.
    """
    records = itertools.islice(_records(files), max_records)
    batches = iter(lambda: list(itertools.islice(records, batch_size)), [])
    start = last_line = time.monotonic()
    for chunk in _in_order(batches, work, num_workers or 1):
        summary.add(chunk)
        yield chunk
        now = time.monotonic()
        if now - last_line >= _SECONDS_BETWEEN_LINES:
            last_line = now
            speed = summary.num_records / (now - start)
            _LOG.info("tokenizing %s: %d records, %.0f records/s", name, summary.num_records, speed)
    seconds = max(time.monotonic() - start, 1e-9)
    _LOG.info(
        "tokenized %s: %d records, %d samples, %d tokens in %.1f s (%.0f records/s)",
        name,
        summary.num_records,
        summary.num_samples,
        summary.num_tokens,
        seconds,
        summary.num_records / seconds,
    )
    for line in summary.skip_lines():
        _LOG.warning("%s: %s", name, line)


def _records(files: Iterable[Path]) -> Iterator[Record]:
    for file in files:
        empty = True
        for record in read_file(file):
            empty = False
            yield record
        if empty:
            raise empty_file(file)


def empty_file(file: Path) -> UserError:
    """The error for a data file without records."""
    return UserError(f"data file {file} holds no records ({file.stat().st_size} bytes)")


_worker_work: Work | None = None


def _start_worker(work: Work) -> None:
    global _worker_work
    _worker_work = work


def _run_in_worker(records: list[Record]) -> Chunk:
    assert _worker_work is not None
    return _worker_work(records)


def _in_order(batches: Iterator[list[Record]], work: Work, num_workers: int) -> Iterator[Chunk]:
    if num_workers == 1:
        yield from map(work, batches)
        return
    # Forked, so that any tokenizer works, also one that cannot be pickled.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(work,)) as pool:
        waiting: deque[Future[Chunk]] = deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(_run_in_worker, batch))
                # Bounded, so that memory does not grow with the input.
                if len(waiting) > 2 * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _end_to_end(items: Sequence[Any]) -> np.ndarray:
    if not items:
        return np.zeros(0, dtype=np.int32)
    return np.concatenate([np.asarray(item, dtype=np.int32) for item in items])


def _piece_lengths(lengths: np.ndarray, piece_length: int) -> np.ndarray:
    pieces: list[int] = []
    for length in lengths.tolist():
        whole, rest = divmod(length, piece_length)
        pieces += [piece_length] * whole + ([rest] if rest else [])
    return np.array(pieces, dtype=np.int32)
