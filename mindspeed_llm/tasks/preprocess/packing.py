"""Packing: put several samples into one sequence of fixed capacity.

    samples      aaaa  bb  ccc  d            capacity 6
    packs        [aaaa bb] [ccc d .. ]       '.' padding
    segments      1111 22   333 4 00         each sample keeps to itself with neat packing

Greedy: the longest sample first, then the longest that still fits, within a window of consecutive samples. Nothing is
dropped; a sample longer than the capacity is an error of the caller (samples are cut before).
"""

import bisect
from collections import deque
from collections.abc import Sequence

import numpy as np


def pack_window(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return packs as lists of positions in `lengths`; every position is in exactly one pack.

    Of samples of one length the first comes first.
    """
    by_length: dict[int, deque[int]] = {}
    for position, length in enumerate(lengths):
        by_length.setdefault(length, deque()).append(position)
    left = sorted(by_length)
    if left and left[-1] > capacity:
        raise ValueError(f"a sample of {left[-1]} tokens does not fit in a pack of {capacity}")
    packs = []
    while left:
        room, pack = capacity, []
        while (fit := bisect.bisect_right(left, room)) > 0:
            length = left[fit - 1]
            pack.append(by_length[length].popleft())
            room -= length
            if not by_length[length]:
                left.pop(fit - 1)
        packs.append(pack)
    return packs


def plan_packs(lengths: np.ndarray, capacity: int, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Plan packs over windows of `window` consecutive samples.

    Returns (members, offsets), both int64: pack p holds the samples members[offsets[p] : offsets[p + 1]].
    """
    members: list[int] = []
    offsets = [0]
    for start in range(0, len(lengths), window):
        for pack in pack_window(lengths[start : start + window].tolist(), capacity):
            members += [start + position for position in pack]
            offsets.append(len(members))
    return np.array(members, dtype=np.int64), np.array(offsets, dtype=np.int64)
