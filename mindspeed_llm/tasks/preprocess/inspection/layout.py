"""A sequence as a list of things to show: runs of equal loss, the starts of segments, what is left out, padding.

Long runs are shortened in their middle, so that every place where the loss begins or ends stays in sight; where that
is not enough, runs in the middle of the sequence are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mindspeed_llm.tasks.preprocess.inspection.decoding import Decoder, Piece
from mindspeed_llm.tasks.preprocess.inspection.streams import NO_LOSS, OTHER_TARGET, Stream


@dataclass(frozen=True)
class Limits:
    """How much of a sequence is shown, in tokens: of a run its `head` and its `tail`, in all about `total`."""

    total: int
    head: int
    tail: int

    @property
    def run(self) -> int:
        """Runs up to this length are shown whole: what is left out must be worth the mark."""
        return self.head + self.tail + 16


@dataclass(frozen=True)
class Run:
    """Tokens of one segment with the same state; of two with another target each is a run by itself."""

    state: int
    pieces: list[Piece]


@dataclass(frozen=True)
class SegmentStart:
    """The following tokens belong to segment `number` of `count`; its start is left out where it is `continued`."""

    number: int
    count: int
    num_tokens: int
    num_targets: int
    continued: bool = False


@dataclass(frozen=True)
class Gap:
    """Tokens that are not shown."""

    num_tokens: int
    num_targets: int


@dataclass(frozen=True)
class Padding:
    """Padding at the end, all shown as one."""

    num_tokens: int
    piece: Piece


Item = Run | SegmentStart | Gap | Padding


def lay_out(stream: Stream, decoder: Decoder, limits: Limits | None) -> Iterator[Item]:
    """Yield the items of a sequence in order; with `limits` None nothing is left out."""
    bounds = _run_bounds(stream)
    first_left_out, first_back = _middle(np.diff(bounds), limits)
    segment_bounds = _changes(stream.segments[: stream.num_tokens]) if stream.segments is not None else None
    for run in range(len(bounds) - 1):
        start, stop = int(bounds[run]), int(bounds[run + 1])
        if run == first_left_out and first_left_out < first_back:
            yield _gap(stream, start, int(bounds[first_back]))
        if first_left_out <= run < first_back:
            continue
        if segment_bounds is not None:
            yield from _segment_start(stream, segment_bounds, start, behind_gap=run == first_back)
        yield from _show(stream, decoder, start, stop, limits)
    if stream.num_padding:
        yield Padding(stream.num_padding, decoder.token(int(stream.ids[-1])))


def _run_bounds(stream: Stream) -> np.ndarray:
    """Places where a run begins, and the end of the last."""
    count = stream.num_tokens
    states = stream.states[:count]
    new = np.ones(count, dtype=bool)
    new[1:] = (states[1:] != states[:-1]) | (states[1:] == OTHER_TARGET)
    if stream.segments is not None:
        new[1:] |= np.diff(stream.segments[:count]) != 0
    return np.append(np.flatnonzero(new), count)


def _changes(numbers: np.ndarray) -> np.ndarray:
    """Places where a segment begins, and the end of the last."""
    return np.concatenate([[0], np.flatnonzero(np.diff(numbers)) + 1, [len(numbers)]])


def _middle(lengths: np.ndarray, limits: Limits | None) -> tuple[int, int]:
    """(first run that is left out, first run after these), such that about `limits.total` tokens are shown."""
    count = len(lengths)
    if limits is None:
        return count, count
    shown = np.minimum(lengths, limits.run)
    if shown.sum() <= limits.total:
        return count, count
    front = max(int(np.searchsorted(np.cumsum(shown), limits.total / 2, side="right")), 1)
    back = max(int(np.searchsorted(np.cumsum(shown[::-1]), limits.total / 2, side="right")), 1)
    return front, max(count - back, front)


def _segment_start(stream: Stream, bounds: np.ndarray, run_start: int, *, behind_gap: bool) -> Iterator[SegmentStart]:
    place = int(np.searchsorted(bounds, run_start, side="right")) - 1
    start, stop = int(bounds[place]), int(bounds[place + 1])
    if run_start == start or behind_gap:
        num_targets = _count_targets(stream, start, stop)
        yield SegmentStart(place + 1, len(bounds) - 1, stop - start, num_targets, continued=run_start != start)


def _show(stream: Stream, decoder: Decoder, start: int, stop: int, limits: Limits | None) -> Iterator[Item]:
    state = int(stream.states[start])
    if limits is None or stop - start <= limits.run:
        yield Run(state, decoder.pieces(stream.ids, start, stop))
        return
    head = decoder.pieces(stream.ids, start, stop, at_least=limits.head)
    tail = decoder.tail(stream.ids, stop - limits.tail, stop, earliest=start)
    yield Run(state, head)
    yield _gap(stream, head[-1].stop, tail[0].start)
    yield Run(state, tail)


def _gap(stream: Stream, start: int, stop: int) -> Gap:
    return Gap(stop - start, _count_targets(stream, start, stop))


def _count_targets(stream: Stream, start: int, stop: int) -> int:
    return int(np.count_nonzero(stream.states[start:stop] != NO_LOSS))
