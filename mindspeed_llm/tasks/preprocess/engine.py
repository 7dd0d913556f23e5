"""Run work over the records of files in chunks, in order, on one or several processes.

A `Work` turns a chunk of records into arrays. It is sent to the worker processes once; chunks travel to them and arrays
come back, in the order of the input whatever the number of workers.
"""

import itertools
import logging
import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Chunk, Summary, Work
from mindspeed_llm.tasks.preprocess.readers import Record, read_file

_LOG = logging.getLogger("mindspeed_llm")
_SECONDS_BETWEEN_LINES = 10.0


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
