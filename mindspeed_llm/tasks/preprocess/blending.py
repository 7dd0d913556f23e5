"""Blends: lists of data sets with or without weights, the order in which their samples come, and row sets of rows."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.index_cache import HoldsMaps

# Numbers that one step of `blend_order` works on, and the fewest steps of a stretch.
_WIDTH = 1 << 15
_FEWEST_STEPS = 256
# Places are counted in 16 bits, as in megatron-core.
_MOST_SETS = np.iinfo(np.int16).max


class Rows(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Chain:
    """Several row sets one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][index - (int(self._ends[part - 1]) if part else 0)]


class Blend(HoldsMaps):
    """Several row sets blended: `which[i]` is the set and `sample[i]` its row at place i."""

    def __init__(self, parts: Sequence[Rows], which: np.ndarray, sample: np.ndarray) -> None:
        self._parts, self._which, self._sample = parts, which, sample

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: int) -> Any:
        return self._parts[int(self._which[index])][int(self._sample[index])]


def parse_blend(items: Sequence[Any], *, field: str) -> tuple[list[str], list[float] | None]:
    """Names of data sets, and their weights where numbers alternate with names: [0.3, a, 0.7, b].

    Raises UserError where only some names have a weight, where a weight is not a number from 0 on, or all are 0.
    """
    texts = [str(item).strip() for item in items]
    is_number = [_is_number(text) for text in texts]
    if len(texts) == 1 or not any(is_number):
        return texts, None
    if len(texts) % 2 or not all(is_number[::2]):
        raise UserError(
            f"{field}: {' '.join(texts)!r} is neither names alone nor a weight before every name (a name that is a "
            "number is written as a path, such as ./2024)"
        )
    weights = [float(text) for text in texts[::2]]
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise UserError(f"{field}: weights {weights}; expected numbers from 0 on, not all 0")
    return texts[1::2], weights


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def normalized(weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """The weights divided by their sum, float64."""
    numbers = np.array(weights, dtype=np.float64)
    return numbers / np.sum(numbers)


def blend_order(weights: Sequence[float] | np.ndarray, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Which data set, and which of its samples, stands at each place of a blend.

    The rule of megatron-core: place p takes the data set with the largest weight * max(p, 1) - (samples taken so far),
    the first of these where several are equal, in double precision, product and difference each rounded (as compiled
    for x86-64; a build that fuses the two may break ties otherwise). A data set of weight 0 is never taken; the rule
    alone would take it where the others are level. With weights that are numbers of samples, as many places as samples
    take each sample once. Returns (data set [N] int16, sample [N] uint32 or int64).

    The rule is sequential, so places are cut in stretches that are worked on side by side, each from a guess of the
    samples taken before it. Whatever the guess, the rule soon leads to the same state; a stretch whose predecessor
    ended in another state than the guess is done again from there, until none is left. The result is exact.
    """
    shares = normalized(weights)
    used = np.flatnonzero(shares)
    if len(weights) > _MOST_SETS:
        raise UserError(f"a blend of {len(weights)} data sets; at most {_MOST_SETS} can be blended")
    shares = shares[used, None]
    num_stretches = max(1, min(_WIDTH // len(used), num_samples // _FEWEST_STEPS))
    num_steps = max(1, -(-num_samples // num_stretches))
    places = np.arange(0, max(num_samples, 1), num_steps, dtype=np.float64)
    taken = _guess(shares, places)
    which = np.empty((len(places), num_steps), dtype=np.int16)
    sample = np.empty((len(places), num_steps), dtype=np.uint32 if num_samples < 1 << 32 else np.int64)
    ends = _take(shares, places, taken, which, sample)
    while len(again := np.flatnonzero((taken[:, 1:] != ends[:, :-1]).any(axis=0)) + 1):
        taken[:, again] = ends[:, again - 1]
        redone = [np.empty((len(again), num_steps), dtype=array.dtype) for array in (which, sample)]
        ends[:, again] = _take(shares, places[again], taken[:, again], *redone)
        which[again], sample[again] = redone
    which = which.reshape(-1)[:num_samples]
    return used.astype(np.int16)[which] if len(used) < len(weights) else which, sample.reshape(-1)[:num_samples]


def _guess(shares: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Samples taken of each data set before each place, nearly: shares rounded down, the rest by largest remainders.

    Shares [K, 1] and places [M] give [K, M]; at place 0 nothing is taken, exactly.
    """
    exact = shares * places
    taken = np.floor(exact)
    # Rank of each remainder within its place, the largest first.
    rank = np.argsort(np.argsort(taken - exact, axis=0, kind="stable"), axis=0, kind="stable")
    return taken + (rank < places - taken.sum(axis=0))


def _take(
    shares: np.ndarray, places: np.ndarray, taken: np.ndarray, which: np.ndarray, sample: np.ndarray
) -> np.ndarray:
    """Apply the rule from each of `places` [M] on, with `taken` [K, M] samples taken before.

    Fills `which` and `sample` [M, steps]; returns what is taken [K, M] behind the last step.
    """
    taken, (num_sets, width) = taken.copy(), taken.shape
    lag = np.empty((num_sets, width))
    columns = np.arange(width)
    for step in range(which.shape[1]):
        np.multiply(shares, np.maximum(places + step, 1.0), out=lag)
        np.subtract(lag, taken, out=lag)
        chosen = _furthest_behind(lag)
        count = taken[chosen, columns]
        which[:, step], sample[:, step] = chosen, count
        taken[chosen, columns] = count + 1
    return taken


def _furthest_behind(lag: np.ndarray) -> np.ndarray:
    """The data set that lags most in each column of `lag` [K, M], the first of equal ones."""
    return lag.argmax(axis=0)
