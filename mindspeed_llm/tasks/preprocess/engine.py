"""Run work over the records of files in batches, in order, on several threads or processes.

A `Work` turns a batch of records into arrays. Work that says `runs_in_threads` spends its time in a tokenizer that
leaves other threads running; records are read and results written meanwhile, all in one process. Other work goes to
forked processes: batches travel to them and arrays come back. Either way the results come in the order of the input,
and are the same whatever the number of workers.
"""

import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Chunk, Summary, Work
from mindspeed_llm.tasks.preprocess.readers import Record, read_file
from mindspeed_llm.tasks.preprocess.tokenizers.threads import without_threads

_LOG = logging.getLogger("mindspeed_llm")
_SECONDS_BETWEEN_LINES = 10.0

BATCH_RECORDS = 1000
"""A batch has at most so many records, and no more once they hold `BATCH_CHARS` characters of text."""
BATCH_CHARS = 1 << 18
# What remains to Python takes turns; with more threads than these it would take longer than the tokenizer.
_MOST_THREADS = 8


def tokenize_files(
    files: Sequence[Path],
    work: Work,
    summary: Summary,
    *,
    num_workers: int | None = None,
    batch_size: int = BATCH_RECORDS,
    max_records: int | None = None,
    name: str = "records",
) -> Iterator[Chunk]:
    """Yield the chunks of all records in order, keeping `summary` up to date and logging the speed.

    Raises UserError when no file has a record; empty ones beside others are reported. `num_workers` None is 1.
    """
    records = itertools.islice(_records(files), max_records)
    start = last_line = time.monotonic()
    for chunk in run_work(in_batches(records, batch_size), work, num_workers or 1):
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


def in_batches(records: Iterable[Record], batch_records: int = BATCH_RECORDS) -> Iterator[list[Record]]:
    """Cut records into batches of at most `batch_records`, fewer where they are long: memory follows the text."""
    batch: list[Record] = []
    chars = 0
    for record in records:
        batch.append(record)
        chars += num_chars(record.data)
        if len(batch) == batch_records or chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def num_chars(value: Any) -> int:
    """Characters of all text in a value of a record."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(num_chars, value.values()))
    return sum(map(num_chars, value)) if isinstance(value, list) else 0


def run_work(
    batches: Iterator[list[Record]],
    work: Work,
    num_workers: int,
    *,
    starting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[Chunk]:
    """Yield the chunk of each batch, in order. An error in reading is raised after what was read before it is worked
    on, so that the first mistake of the input is the one that is reported.

    `starting` is entered wherever processes or threads may be started, for callers whose signal handlers raise. What is
    raised while results are waited for ends the work at once, but for a thread's call of the tokenizer. Raises
    UserError where a worker process is killed.
    """
    with without_threads():
        if getattr(work, "runs_in_threads", False) and num_workers <= _MOST_THREADS:
            pool = ThreadPoolExecutor(num_workers)
            try:
                yield from _in_order(batches, pool, work, num_workers, starting)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        elif num_workers == 1:
            yield from map(work, batches)
        else:
            # Forked, so that any tokenizer works, also one that cannot be pickled.
            context = multiprocessing.get_context("fork")
            with ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(work,)) as processes:
                try:
                    yield from _in_order(batches, processes, _run_in_worker, num_workers, starting)
                except BrokenProcessPool as error:
                    raise UserError(
                        "a worker process was killed, most likely because memory ran out; use fewer workers (--workers "
                        "of preprocess_data.py, data.preprocessing_num_workers), or a machine with more memory"
                    ) from error
                except BaseException:
                    # Nobody waits for what they are at.
                    for process in list((processes._processes or {}).values()):
                        process.terminate()
                    raise


def _in_order(
    batches: Iterator[list[Record]],
    pool: Executor,
    work: Any,
    num_workers: int,
    starting: Callable[[], AbstractContextManager[None]],
) -> Iterator[Chunk]:
    waiting: deque[Future[Chunk]] = deque()
    error: Exception | None = None
    try:
        while True:
            try:
                batch = next(batches, None)
            except Exception as raised:
                batch, error = None, raised
            if batch is None:
                break
            with starting():
                waiting.append(pool.submit(work, batch))
            # Bounded, so that memory does not grow with the input.
            if len(waiting) > 2 * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        if error is not None:
            raise error
    finally:
        for future in waiting:
            future.cancel()


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
        return UserError(
            f"data file {files[0]} holds no records ({files[0].stat().st_size} bytes); expected one or more. "
            "Write it again, or name another file"
        )
    return UserError(f"none of the {len(files)} data files in {files[0].parent} holds a record")


_worker_work: Work | None = None


def _start_worker(work: Work) -> None:
    global _worker_work
    _worker_work = work
    # Ctrl-C reaches every process of the terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process that is killed cannot end its workers, and they would wait for it forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _run_in_worker(records: list[Record]) -> Chunk:
    assert _worker_work is not None
    return _worker_work(records)
