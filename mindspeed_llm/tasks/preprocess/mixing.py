"""Mix several data sets: which sample of which set comes at each place.

The strategies have the meaning of `datasets.concatenate_datasets` and `datasets.interleave_datasets`:
concat: one after the other. interleave_under: turns (or draws by probability) until one set is used up.
interleave_over: until every set has been used up once, with those that end earlier starting again.
"""

from collections.abc import Sequence

import numpy as np

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
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
    shares = np.array(probabilities, dtype=np.float64) / sum(probabilities)
    sets = np.zeros(0, dtype=np.int64)
    while True:
        sets = np.concatenate([sets, random.choice(len(sizes), size=max(1000, sum(sizes)), p=shares)])
        # Place after which each set is used up; the length where it never is.
        ends = [_place_of_nth(sets == number, size) for number, size in enumerate(sizes)]
        reached = [end for end in ends if end is not None]
        if strategy == "interleave_under" and reached:
            return sets[: min(reached)]
        if strategy == "interleave_over" and len(reached) == len(sizes):
            return sets[: max(reached)]


def _place_of_nth(mine: np.ndarray, count: int) -> int | None:
    places = np.flatnonzero(mine)
    return int(places[count - 1]) + 1 if len(places) >= count else None


def resample(size: int, count: int, seed: int) -> np.ndarray:
    """`count` samples out of `size`, int64: each as often as any other, give or take one, in random order."""
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
    rounds = [random.permutation(size) for _ in range(-(-count // size))]
    return np.concatenate(rounds)[:count]
