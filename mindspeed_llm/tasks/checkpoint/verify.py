"""Checking an output before it is published: it is read back as a user's file would be, and compared with its source.

Three views of the same weights must agree. The files hold just the tensors of the plan. Each of these tensors has the
values that the plan puts there, in every file that has a copy, and zeros where it is padded. And the output, opened
anew with nothing but what it says about itself, gives the source's tensors back bit for bit.

That the mapping itself is the one that training expects cannot be seen here, since both directions follow it; the
reference files of the tests show it.
"""

from __future__ import annotations

import math
import os
import random
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.boxes import Box, identity, take
from mindspeed_llm.tasks.checkpoint.hf_reader import open_weight_file
from mindspeed_llm.tasks.checkpoint.mg_reader import open_rank_file
from mindspeed_llm.tasks.checkpoint.model import HfTensor
from mindspeed_llm.tasks.checkpoint.plan import Plan, Target, TargetFile
from mindspeed_llm.tasks.checkpoint.slabs import assemble, slab_at, slabs
from mindspeed_llm.tasks.checkpoint.sources import Source

_LOOK_BYTES = 4 * 2**10
"""What is compared of each target tensor, at a random place."""
_CHOSEN_SHARE = 0.02
"""Of the source tensors of each kind (names that differ in numbers only), and at least `_CHOSEN_LEAST` of them."""
_CHOSEN_LEAST = 2
_CHOSEN_SLABS = 4
"""Parts of `_CHOSEN_BYTES` that are compared of a chosen source tensor: all of it where it is no larger."""
_CHOSEN_BYTES = 2**20
_SEED = 0
# Wide numbers are compared faster than bytes.
_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Check = Callable[[], int]
"""Compares something and gives the number of bytes; raises UserError where it differs."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What a verification has looked at, without finding a fault."""

    targets: int
    """Target tensors of which name, shape, dtype and values (in part or in full) were compared."""
    sources: int
    """Source tensors that were converted back."""
    nbytes: int
    """Bytes that were compared, both ways."""


def verify(
    folder: Path,
    plan: Plan,
    source: Source,
    output: Callable[[], Source],
    tensors: Mapping[str, HfTensor],
    *,
    full: bool,
    workers: int,
    on_bytes: Callable[[int], None] | None = None,
) -> Verified:
    """Compare the files in `folder` with the plan and its source.

    Args:
        output: opens what is in `folder`, by what it says about itself.
        tensors: the model's Hugging Face tensors.
        full: compare everything, instead of a part of each target tensor and some source tensors.
        on_bytes: called with the number of bytes that a comparison has read.

    Raises:
        UserError: they differ; names file and tensor.
    """
    chance = random.Random(_SEED)
    chosen: list[str] = []

    def checks() -> Iterator[Check]:
        for file in plan.files:
            yield from _forward(folder, file, source, chance, full)
        values = _open(output)
        taken = _accounted(plan, source, values)
        chosen.extend(taken if full else _choose(taken, chance))
        # Where each target is a source tensor, both ways are one.
        if full and all(file.rank is None for file in plan.files):
            return
        for name in chosen:
            yield _backward(tensors[name], source, values, chance, full)

    nbytes = _run(checks(), workers, on_bytes)
    return Verified(targets=sum(len(file.targets) for file in plan.files), sources=len(chosen), nbytes=nbytes)


def forget_cached(path: Path) -> None:
    """Let the next reading of a file that is on the disk come from there, where the system can do that."""
    if not hasattr(os, "posix_fadvise"):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _run(checks: Iterator[Check], workers: int, on_bytes: Callable[[int], None] | None) -> int:
    running: deque[Future[int]] = deque()
    total = 0

    def end_one() -> None:
        nonlocal total
        nbytes = running.popleft().result()
        total += nbytes
        if on_bytes is not None:
            on_bytes(nbytes)

    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="convert verify") as pool:
        try:
            for check in checks:
                running.append(pool.submit(check))
                # A bound, since a large model has more tensors than should wait in memory.
                if len(running) > 64 * workers:
                    end_one()
            while running:
                end_one()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return total


# Each target tensor has the values that the plan puts there


@dataclass(frozen=True, kw_only=True)
class _Stored:
    dtype: torch.dtype
    shape: tuple[int, ...]
    view: Callable[[], torch.Tensor]


def _stored(path: Path, file: TargetFile) -> dict[str, _Stored]:
    if file.rank is None:
        return {
            name: _Stored(dtype=tensor.dtype, shape=tensor.shape, view=tensor.view)
            for name, tensor in open_weight_file(path).items()
        }
    return {
        f"{chunk}/{key}": _Stored(dtype=tensor.dtype, shape=tensor.shape, view=tensor.view)
        for chunk, tensors in open_rank_file(path).models.items()
        for key, tensor in tensors.items()
    }


def _forward(folder: Path, file: TargetFile, source: Source, chance: random.Random, full: bool) -> Iterator[Check]:
    path = folder / file.path
    try:
        stored = _stored(path, file)
    except UserError as error:
        raise _failure(str(error)) from error
    expected = {target.key: (target.dtype, target.shape) for target in file.targets}
    found = {key: (tensor.dtype, tensor.shape) for key, tensor in stored.items()}
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            raise _failure(f"{file.path}: {key} is {_words(found.get(key))}, expected {_words(expected.get(key))}")
    # Where nothing was written the file has a hole; some file systems make one of written zeros, too.
    full |= _has_hole(path)
    for target in file.targets:
        yield partial(
            _check_target,
            file.path,
            target,
            list(slabs(target)) if full else _look(target, chance),
            stored[target.key].view,
            source,
        )


def _check_target(file: str, target: Target, boxes: list[Box], view: Callable[[], torch.Tensor], source: Source) -> int:
    values = view().view(target.view)
    if target.padding is not None and take(values, target.padding).any():
        raise _failure(f"{file}: {target.key} is not zero where it is padded, at {_words_of(target.padding)}")
    nbytes = 0
    for box in boxes:
        expected = assemble(target, box, source)
        if not _same_bits(expected, take(values, box)):
            raise _failure(f"{file}: {target.key} does not hold what the source has for it at {_words_of(box)}")
        nbytes += expected.nbytes
    return nbytes


def _look(target: Target, chance: random.Random) -> list[Box]:
    count = math.prod(target.view)
    return [slab_at(target, chance.randrange(count), _LOOK_BYTES)] if count else []


def _has_hole(path: Path) -> bool:
    if not hasattr(os, "SEEK_HOLE"):
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # The end of a file counts as one.
        return os.lseek(descriptor, 0, os.SEEK_HOLE) < os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


# The output gives the source's tensors back


def _open(output: Callable[[], Source]) -> Source:
    try:
        return output()
    except UserError as error:
        raise _failure(f"it cannot be read back by what it says about itself: {error}") from error


def _accounted(plan: Plan, source: Source, output: Source) -> list[str]:
    """The source tensors that the output must give back in full."""
    if lost := source.names() - plan.taken - plan.dropped.keys():
        raise _failure(f"source tensor {min(lost)} was neither taken nor named as dropped")
    if lost := plan.taken - output.names():
        raise _failure(f"source tensor {min(lost)} was taken, but the output cannot give it back")
    return sorted(plan.taken)


def kind(name: str) -> str:
    """What names that differ in numbers only have in common."""
    return re.sub(r"\d+", "*", name)


def _choose(names: list[str], chance: random.Random) -> list[str]:
    kinds = defaultdict(list)
    for name in names:
        kinds[kind(name)].append(name)
    chosen: list[str] = []
    for members in kinds.values():
        count = max(math.ceil(_CHOSEN_SHARE * len(members)), _CHOSEN_LEAST)
        chosen += chance.sample(members, min(count, len(members)))
    return chosen


def _backward(tensor: HfTensor, source: Source, output: Source, chance: random.Random, full: bool) -> Check:
    target = Target(
        key=tensor.name,
        shape=tensor.shape,
        view=tensor.view,
        dtype=output.dtype(tensor.name),
        pieces=((tensor.name, identity(tensor.view)),),
    )
    boxes = list(slabs(target) if full else slabs(target, _CHOSEN_BYTES))
    if not full and len(boxes) > _CHOSEN_SLABS:
        boxes = chance.sample(boxes, _CHOSEN_SLABS)
    return partial(_check_source, target, boxes, source, output)


def _check_source(target: Target, boxes: list[Box], source: Source, output: Source) -> int:
    nbytes = 0
    for box in boxes:
        expected = assemble(target, box, source)
        if not _same_bits(expected, assemble(target, box, output)):
            places = sorted({f"{each.file}: {each.key}" for each in output.fragments(target.key, box)})
            raise _failure(
                f"{', '.join(places)}: gives back another {target.key} than the source has, at {_words_of(box)}"
            )
        nbytes += expected.nbytes
    return nbytes


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal, NaN and the sign of zero included."""
    width = _OF_WIDTH[one.dtype.itemsize]
    return torch.equal(*(tensor.contiguous().reshape(-1).view(width) for tensor in (one, other)))


def _words(found: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "missing" if found is None else f"{str(found[0]).removeprefix('torch.')} {list(found[1])}"


def _words_of(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def _failure(what: str) -> UserError:
    return UserError(
        f"verification failed, nothing was published: {what}. Convert again; if it fails again, disk or memory of this "
        "machine may be faulty, or the source was changed meanwhile; else this is a fault of the converter, please "
        "report it"
    )
