"""Unpacked samples on disk -> packs of a fixed number of tokens on disk.

    input_ids        a a a b b c . .        '.' is the pad token
    labels           - A A - B C - -        '-' is -100
    attention_mask   1 1 1 1 1 1 1 1        1 everywhere, or with neat packing
                     1 1 1 2 2 3 0 0        the number of the sample in its pack

Samples are packed within windows of consecutive samples of a limited number of tokens. The windows follow from the
lengths alone, so that the parts in which the samples were made do not matter, and memory holds one window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np

from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, IndexedWriter, bin_file
from mindspeed_llm.tasks.preprocess.packing import pack_window
from mindspeed_llm.tasks.preprocess.samples import IGNORE_INDEX

_WINDOW_TOKENS = 1 << 21
_WINDOW_PACKS = 64
_BLOCK = 1 << 18
PACK_KEYS = ("input_ids", "attention_mask", "labels")


class _Stream:
    """The ids of several indexed files, end to end."""

    def __init__(self, prefixes: Sequence[Path], stack: ExitStack) -> None:
        self._files: list[IO[bytes]] = [stack.enter_context(bin_file(prefix).open("rb")) for prefix in prefixes]

    def take(self, count: int) -> np.ndarray:
        """The next `count` ids, int32."""
        ids = np.empty(count, np.int32)
        view, filled = ids.view(np.uint8), 0
        while filled < len(view):
            read = self._files[0].readinto(view[filled:])  # type: ignore[attr-defined]
            if not read:
                self._files.pop(0)
            filled += read
        return ids


def write_packs(parts: Sequence[Path], target: Path, *, capacity: int, pad_id: int, neat: bool) -> int:
    """Pack the samples of `parts` (folders with input_ids and labels) into `target`_<key>; returns the number of packs.

    Every sample is in exactly one pack; the order of packs and of samples in them is that of `packing.pack_window`.
    """
    num_packs = 0
    with ExitStack() as stack:
        ids, labels = (_Stream([part / key for part in parts], stack) for key in ("input_ids", "labels"))
        writers = {
            key: stack.enter_context(IndexedWriter(target.with_name(f"{target.name}_{key}"))) for key in PACK_KEYS
        }
        for lengths in _windows(_blocks(parts), max(_WINDOW_TOKENS, _WINDOW_PACKS * capacity)):
            packs = pack_window(lengths.tolist(), capacity)
            total = int(lengths.sum(dtype=np.int64))
            sources = {"input_ids": ids.take(total), "labels": labels.take(total)}
            place, segment = _places(packs, lengths, capacity)
            rows = np.full(len(packs), capacity)
            for key, fill in (("input_ids", pad_id), ("labels", IGNORE_INDEX)):
                packed = np.full(len(packs) * capacity, fill, np.int32)
                packed[place] = sources[key]
                writers[key].add_many(packed, rows)
            mask = np.full(len(packs) * capacity, 0 if neat else 1, np.int32)
            if neat:
                mask[place] = segment
            writers["attention_mask"].add_many(mask, rows)
            num_packs += len(packs)
    return num_packs


def _places(packs: Sequence[Sequence[int]], lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """For each token of the window: its place in the packs laid end to end, and its sample's number in the pack."""
    starts, numbers = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int32)
    for row, pack in enumerate(packs):
        at = row * capacity
        for number, sample in enumerate(pack, start=1):
            starts[sample], numbers[sample] = at, number
            at += int(lengths[sample])
    before = np.cumsum(lengths, dtype=np.int64) - lengths
    place = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum(dtype=np.int64)))
    return place, np.repeat(numbers, lengths)


def _blocks(parts: Sequence[Path]) -> Iterator[np.ndarray]:
    """The lengths of all samples of the parts."""
    for part in parts:
        lengths = IndexedReader(part / "input_ids").lengths
        for start in range(0, len(lengths), _BLOCK):
            yield lengths[start : start + _BLOCK]


def _windows(blocks: Iterator[np.ndarray], num_tokens: int) -> Iterator[np.ndarray]:
    """Cut the lengths of samples in windows: each as many samples as `num_tokens` holds, but one at least."""
    left = np.zeros(0, np.int32)
    for block in blocks:
        left = np.concatenate([left, block])
        while int(left.sum(dtype=np.int64)) > num_tokens:
            count = max(1, int(np.searchsorted(np.cumsum(left, dtype=np.int64), num_tokens, side="right")))
            yield left[:count]
            left = left[count:]
    if len(left):
        yield left
