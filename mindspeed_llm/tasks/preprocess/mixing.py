"""Mix several data sets: which sample of which set comes at each place.

The strategies are those of `datasets.concatenate_datasets` and `datasets.interleave_datasets`, with the same draws:
concat: one after the other. interleave_under: turns (or draws by probability) until one set is used up.
interleave_over: until every set has been used up once, with those that end earlier starting again.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.dataset_info import DatasetEntry
from mindspeed_llm.tasks.preprocess.readers import Record, read_file

_LOG = logging.getLogger("mindspeed_llm")

Item = TypeVar("Item")

STRATEGIES = ("concat", "interleave_under", "interleave_over")


def mix(
    sizes: Sequence[int], strategy: str = "concat", probabilities: Sequence[float] | None = None, seed: int = 42
) -> tuple[np.ndarray, np.ndarray]:
    """Return (set, sample), int64 arrays of equal length, for sets of the given sizes."""
    if strategy == "concat" or len(sizes) == 1:
        sets = np.repeat(np.arange(len(sizes)), sizes)
        return sets, np.concatenate([np.arange(size) for size in sizes])
    sets = _turns(sizes, strategy) if probabilities is None else _draws(sizes, strategy, probabilities, seed)
    samples = np.zeros_like(sets)
    for number, size in enumerate(sizes):
        mine = sets == number
        samples[mine] = np.arange(int(mine.sum())) % size
    return sets, samples


def _turns(sizes: Sequence[int], strategy: str) -> np.ndarray:
    rounds = min(sizes) if strategy == "interleave_under" else max(sizes)
    return np.tile(np.arange(len(sizes)), rounds)


def _draws(sizes: Sequence[int], strategy: str, probabilities: Sequence[float], seed: int) -> np.ndarray:
    blocks: list[np.ndarray] = []
    counts = np.zeros(len(sizes), dtype=np.int64)
    enough = np.any if strategy == "interleave_under" else np.all
    for block in _drawn_blocks(len(sizes), probabilities, seed):
        blocks.append(block)
        counts += np.bincount(block, minlength=len(sizes))
        if enough(counts >= sizes):
            break
    sets = np.concatenate(blocks)
    # Place after which each set is used up; left out where it never is.
    ends = [_place_of_nth(sets == number, size) for number, size in enumerate(sizes)]
    reached = [end for end in ends if end is not None]
    return sets[: min(reached) if strategy == "interleave_under" else max(reached)]


def _drawn_blocks(count: int, probabilities: Sequence[float], seed: int) -> Iterator[np.ndarray]:
    """Set numbers without end, drawn in blocks of the size that the datasets library uses."""
    random = np.random.default_rng(seed)
    shares = np.array(probabilities, dtype=np.float64) / sum(probabilities)
    while True:
        yield random.choice(count, size=1000, p=shares)


def _place_of_nth(mine: np.ndarray, count: int) -> int | None:
    places = np.flatnonzero(mine)
    return int(places[count - 1]) + 1 if len(places) >= count else None


def resample(size: int, count: int, seed: int) -> np.ndarray:
    """`count` samples out of `size`, int64: each as often as any other, give or take one, in random order."""
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
    rounds = [random.permutation(size) for _ in range(-(-count // size))]
    return np.concatenate(rounds)[:count]


def mixed_records(
    entries: Sequence[DatasetEntry],
    strategy: str = "concat",
    probabilities: Sequence[float] | None = None,
    seed: int = 42,
    max_samples: int | None = None,
    read: Callable[[Path], Iterator[Record]] = read_file,
) -> Iterator[Record]:
    """Yield the records of several data sets, mixed, each with the number of its set as `source`.

    The sets are read from front to back and again where they start anew, so that memory does not grow with them; of
    each at most `max_samples` are read. An entry with `num_samples` gives that many, the same that `resample` chooses,
    in the order of its files. `read` reads a file. Raises UserError for probabilities that do not fit and for a set
    without records.
    """
    if probabilities is not None:
        _check_probabilities(entries, strategy, probabilities)

    def opener(number: int, entry: DatasetEntry) -> Callable[[], Iterator[Record]]:
        if number == 0:
            return lambda: _chosen(entry, max_samples, seed, read)
        return lambda: (record._replace(source=number) for record in _chosen(entry, max_samples, seed, read))

    opens = [opener(number, entry) for number, entry in enumerate(entries)]
    return interleaved(opens, [entry.name for entry in entries], strategy, probabilities, seed)


def interleaved(
    opens: Sequence[Callable[[], Iterator[Item]]],
    names: Sequence[str],
    strategy: str,
    probabilities: Sequence[float] | None = None,
    seed: int = 42,
) -> Iterator[Item]:
    """Yield the items of several sources in the order that `mix` gives, without knowing their sizes.

    `opens` open a source at its beginning; `names` are for messages.
    """
    sources = [open_source() for open_source in opens]
    ahead = [next(source, None) for source in sources]
    for name, item in zip(names, ahead, strict=True):
        if item is None:
            raise UserError(f"data set {name!r} holds no records")
    if strategy == "concat" or len(opens) == 1:
        for item, source in zip(ahead, sources, strict=True):
            assert item is not None
            yield item
            yield from source
        return
    used_up: set[int] = set()
    is_enough = 1 if strategy == "interleave_under" else len(opens)
    if probabilities is None:
        turns: Iterator[int] = itertools.cycle(range(len(opens)))
    else:
        turns = (int(number) for block in _drawn_blocks(len(opens), probabilities, seed) for number in block)
    for number in turns:
        item = ahead[number]
        if item is None:
            sources[number] = opens[number]()
            item = next(sources[number])
        yield item
        ahead[number] = next(sources[number], None)
        if ahead[number] is None:
            used_up.add(number)
        # Without probabilities a round is finished, so that each set gives as many.
        is_round = probabilities is not None or number == len(opens) - 1
        if is_round and len(used_up) >= is_enough:
            return


def _chosen(
    entry: DatasetEntry, max_samples: int | None, seed: int, read: Callable[[Path], Iterator[Record]]
) -> Iterator[Record]:
    def records() -> Iterator[Record]:
        return itertools.islice((record for file in entry.files for record in _records(file, read)), max_samples)

    if entry.num_samples is None:
        return records()
    # Read once to count: which are chosen depends on how many there are.
    size = sum(1 for _ in records())
    if not size:
        return iter(())
    times = np.bincount(resample(size, entry.num_samples, seed), minlength=size)
    return (record for record, count in zip(records(), times, strict=True) for _ in range(count))


def _records(file: Path, read: Callable[[Path], Iterator[Record]]) -> Iterator[Record]:
    is_empty = True
    for record in read(file):
        is_empty = False
        yield record
    if is_empty:
        _report_empty(file)


@cache
def _report_empty(file: Path) -> None:
    # Once, however often the data set starts again.
    _LOG.warning("data file %s holds no records", file)


def _check_probabilities(entries: Sequence[DatasetEntry], strategy: str, probabilities: Sequence[float]) -> None:
    shown = ",".join(map(str, probabilities))
    if strategy == "concat":
        raise UserError(
            f"--interleave-probs {shown} has no effect with --mix-strategy concat; choose interleave_under or "
            "interleave_over"
        )
    if len(probabilities) != len(entries):
        names = ", ".join(entry.name for entry in entries)
        raise UserError(f"--interleave-probs {shown}: {len(entries)} data sets need as many numbers ({names})")
    if min(probabilities) <= 0 or abs(sum(probabilities) - 1) > 1e-6:
        raise UserError(f"--interleave-probs {shown}: expected numbers above 0 that add up to 1, such as 0.7,0.3")
