"""Whether the ranks of a Megatron checkpoint agree on what several of them hold.

Norms stand on each tensor parallel rank, all but experts on each expert parallel one, and a tied embedding on the first
and the last stage. A conversion reads one of these replicas; the others show whether the files belong together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from mindspeed_llm.errors import UserError

_LOOK = 2**11
"""Elements that are compared of each replica unless all are, at a random place."""
_SLAB = 2**21
"""Elements that are compared at once."""
_SEED = 0
_BATCH = 512
_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Replica:
    """A part of a Hugging Face tensor on another rank than the one that it is read from."""

    name: str
    first: str
    """The file and the key that it is read from."""
    other: str
    views: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    """Both, in the same shape, as views of their files."""


def check_replicas(replicas: Sequence[Replica], *, full: bool, workers: int) -> int:
    """Compare replicas with what is read, and give the number of values that were compared.

    Args:
        full: all values, instead of some of each replica.
        workers: threads.

    Raises:
        UserError: two differ; names both files.
    """
    chance = random.Random(_SEED)

    def compared(replica: Replica, place: float) -> int:
        first, other = replica.views()
        count = 0
        for one, two in _slabs(first, other) if full else [_look(first, other, place)]:
            if not _same(one, two):
                raise UserError(
                    f"{replica.first} and {replica.other} hold different values of {replica.name}, which should be "
                    "one on all ranks; are the files of one checkpoint, and whole? Copy them again, or, if the ranks "
                    "went apart in training and the first is the one to keep, give --verify none"
                )
            count += one.numel()
        return count

    total = 0
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="convert replicas") as pool:
        for start in range(0, len(replicas), _BATCH):
            batch = replicas[start : start + _BATCH]
            total += sum(pool.map(compared, batch, [chance.random() for _ in batch]))
    return total


def _look(first: torch.Tensor, other: torch.Tensor, place: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A row of both, or a part of one, at a place from 0 to 1."""
    while first.dim() > 1:
        index = int(place * first.shape[0])
        place = place * first.shape[0] - index
        first, other = first[index], other[index]
    if first.dim() == 0 or len(first) <= _LOOK:
        return first, other
    start = int(place * (len(first) - _LOOK))
    return first[start : start + _LOOK], other[start : start + _LOOK]


def _slabs(first: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if first.dim() == 0:
        yield first, other
        return
    rows = max(_SLAB // max(first[:1].numel(), 1), 1)
    yield from zip(first.split(rows), other.split(rows), strict=True)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether values are equal bit for bit; of several dtypes, in the narrower of them."""
    if one.dtype != other.dtype:
        narrow = min(one.dtype, other.dtype, key=lambda each: each.itemsize)
        one, other = one.to(narrow), other.to(narrow)
    width = _OF_WIDTH[one.dtype.itemsize]
    return torch.equal(*(each.contiguous().reshape(-1).view(width) for each in (one, other)))
