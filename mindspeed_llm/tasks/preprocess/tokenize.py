"""Records -> token ids, in chunks, in order, on one or several processes; skipped records are counted by reason.

A `Work` turns a chunk of records into arrays. It is sent to the worker processes once; chunks travel to them and arrays
come back, in the order of the input whatever the number of workers.
"""

import itertools
import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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
ONE_TOKEN = "text of one token, with nothing to predict"
# What tokenizers raise for a text that they cannot take.
_TOKENIZER_ERRORS = (TypeError, ValueError, OverflowError)


@dataclass
class Chunk:
    """Token arrays of some records: `arrays[key]` holds all sequences end to end, `lengths` the length of each.

    `empty_replies` counts records with a reply without text, which teaches to say nothing.
    """

    arrays: dict[str, np.ndarray]
    lengths: np.ndarray
    num_records: int
    skipped: list[tuple[str, str]] = field(default_factory=list)
    empty_replies: int = 0


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
    empty_replies: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    first_skipped: dict[str, list[str]] = field(default_factory=dict)

    def add(self, chunk: Chunk) -> None:
        """Count a chunk in."""
        self.num_records += chunk.num_records
        self.num_samples += len(chunk.lengths)
        self.num_tokens += int(chunk.lengths.sum())
        self.empty_replies += chunk.empty_replies
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

    def notes(self) -> list[str]:
        """What is worth a look among the records that were not skipped."""
        return [f"{self.empty_replies} records have an empty reply"] if self.empty_replies else []


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

    def sample(self, record: Record) -> tuple[np.ndarray, np.ndarray, bool]:
        """(ids, labels, whether a reply is empty) of one record; raises UnusableRecord, or UserError naming file and
        line.
        """
        try:
            conversation = to_conversation(record, self._formatting, self._columns, self._tags)
            turns = self._renderer.turns(conversation)
        except UserError as error:
            raise error if record.where in str(error) else UserError(f"{record.where}: {error}") from error
        except _TOKENIZER_ERRORS as error:
            raise _not_tokenized(record, error) from error
        is_empty = any(message.role == "assistant" and not message.content.strip() for message in conversation.messages)
        return *build_sample(turns, self._options, self._renderer.efficient_eos_id), is_empty

    def __call__(self, records: Sequence[Record]) -> Chunk:
        ids, labels, skipped, empty_replies = [], [], [], 0
        for record in records:
            try:
                sample = self.sample(record)
            except UnusableRecord as reason:
                skipped.append((str(reason), record.where))
                continue
            ids.append(sample[0])
            labels.append(sample[1])
            empty_replies += sample[2]
        arrays = {"input_ids": _end_to_end(ids), "labels": _end_to_end(labels)}
        lengths = np.array([len(item) for item in ids], dtype=np.int32)
        return Chunk(arrays, lengths, len(records), skipped, empty_replies)


class TextWork:
    """Records of text -> ids of whole documents (key `text`), with the tokenizer's own begin token where it adds one.

    `append_eod` adds the eos token to each document, unless the tokenizer has done so. With `piece_length` documents
    are split in pieces of at most that many tokens (2 or more); a piece of one token, which has nothing to predict, is
    left out.
    """

    keys: tuple[str, ...] = ("text",)

    def __init__(
        self, tokenizer: Any, *, column: str = "text", append_eod: bool = False, piece_length: int | None = None
    ) -> None:
        self._tokenizer, self._column, self._piece_length = tokenizer, column, piece_length
        assert piece_length is None or piece_length > 1
        self._eod = tokenizer.eos_token_id if append_eod else None
        if append_eod and self._eod is None:
            raise UserError("data.append_eod is true, but the tokenizer has no eos token to append")

    def __call__(self, records: Sequence[Record]) -> Chunk:
        kept, skipped = [], []
        for record in records:
            if text_of(record, self._column).strip():
                kept.append(record)
            else:
                skipped.append((EMPTY_TEXT, record.where))
        documents = self._documents(kept)
        if self._piece_length is None:
            lengths = np.array([len(ids) for ids in documents], dtype=np.int32)
        else:
            skipped += [(ONE_TOKEN, record.where) for record, ids in zip(kept, documents, strict=True) if len(ids) == 1]
            # A last piece of one token goes.
            documents = [ids[:-1] if len(ids) % self._piece_length == 1 else ids for ids in documents]
            lengths = _piece_lengths([len(ids) for ids in documents], self._piece_length)
        return Chunk({"text": _end_to_end(documents)}, lengths, len(records), skipped)

    def _documents(self, records: Sequence[Record]) -> list[list[int]]:
        if not records:
            return []
        try:
            documents = self._encode([record.data[self._column] for record in records])
        except _TOKENIZER_ERRORS:
            for record in records:
                try:
                    self._encode([record.data[self._column]])
                except _TOKENIZER_ERRORS as error:
                    raise _not_tokenized(record, error) from error
            raise
        if self._eod is None:
            return documents
        return [ids if ids and ids[-1] == self._eod else [*ids, self._eod] for ids in documents]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]


def text_of(record: Record, column: str) -> str:
    """The text of a record; raises UserError when the column is missing or holds something else."""
    if column not in record.data:
        raise missing_column(record, "text", column)
    text = record.data[column]
    if not isinstance(text, str):
        shown = "null" if text is None else type(text).__name__
        raise UserError(f"{record.where}: key {column!r}: expected text, found {shown}")
    return text


def _not_tokenized(record: Record, error: Exception) -> UserError:
    for key, value in record.data.items():
        if _has_lone_surrogate(value):
            return UserError(
                f"{record.where}: key {key!r}: the text holds half of a surrogate pair (such as \\ud800), which is no "
                "character; repair the text or remove the record"
            )
    return UserError(f"{record.where}: the tokenizer cannot take the text ({type(error).__name__}: {error})")


def _has_lone_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return any("\ud800" <= char <= "\udfff" for char in value)
    if isinstance(value, Mapping):
        return any(map(_has_lone_surrogate, value.values()))
    return isinstance(value, list) and any(map(_has_lone_surrogate, value))


def tokenize_files(
    files: Sequence[Path],
    work: Work,
    summary: Summary,
    *,
    num_workers: int | None = None,
    batch_size: int = 1000,
    max_records: int | None = None,
    name: str = "records",
) -> Iterator[Chunk]:
    """Yield the chunks of all records in order, keeping `summary` up to date and logging the speed.

    Raises UserError when no file has a record; empty ones beside others are reported. `num_workers` None or 1 works in
    this process.
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
    for line in (*summary.skip_lines(), *summary.notes()):
        _LOG.warning("%s: %s", name, line)


def _records(files: Sequence[Path]) -> Iterator[Record]:
    empty = []
    for file in files:
        size = 0
        for record in read_file(file):
            size += 1
            yield record
        if not size:
            empty.append(file)
    if len(empty) == len(files):
        raise empty_files(files)
    for file in empty:
        _LOG.warning("data file %s holds no records", file)


def empty_files(files: Sequence[Path]) -> UserError:
    """The error for data files that all have no records."""
    if len(files) == 1:
        return UserError(f"data file {files[0]} holds no records ({files[0].stat().st_size} bytes)")
    return UserError(f"none of the {len(files)} data files in {files[0].parent} holds a record")


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


def _piece_lengths(lengths: Sequence[int], piece_length: int) -> np.ndarray:
    pieces: list[int] = []
    for length in lengths:
        whole, rest = divmod(length, piece_length)
        pieces += [piece_length] * whole + ([rest] if rest else [])
    return np.array(pieces, dtype=np.int32)
