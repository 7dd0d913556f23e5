"""A plan as a table: which source tensor goes where, before anything is written.

Rows that differ in nothing but layer and expert numbers are shown as one: `decoder.layers.{0-13}...` is made of
`model.layers.{14-27}...`, in this order.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_llm.tasks.checkpoint.boxes import Box, whole
from mindspeed_llm.tasks.checkpoint.model import HfTensor
from mindspeed_llm.tasks.checkpoint.plan import Plan, Target
from mindspeed_llm.tasks.checkpoint.report import adapter_text
from mindspeed_llm.tasks.checkpoint.sources import Source

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class _Cell:
    """A tensor: the file or chunk that it is in, its name, and what else is shown of it."""

    where: str
    name: str
    facts: str

    def __str__(self) -> str:
        return f"{self.where}{self.name} {self.facts}"


_Row = tuple[_Cell, ...]
"""A target tensor, and the tensors that it is made of."""


def lines(
    plan: Plan, source: Source, tensors: Mapping[str, HfTensor], adapter: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """The table, file by file.

    Args:
        tensors: the model's Hugging Face tensors, in whose views parts are given.
        adapter: what `adapter.summary` says of an adapter.
    """
    if adapter is not None:
        yield f"adapter: {adapter_text(adapter)}"
        for name, count in adapter["weights"].items() if adapter["merged"] else ():
            yield f"  {name} ({count}) + {adapter['alpha']} / {adapter['rank']} * B A"
    for file in plan.files:
        yield f"{file.path}: {len(file.targets)} tensors, {file.nbytes / 1e9:.3f} GB"
        rows = list(_merged(_row(target, source, tensors) for target in file.targets))
        width = max((len(str(row[0])) for row in rows), default=0)
        for target, *origins in rows:
            first, *others = [str(origin) for origin in origins] or ["zeros"]
            yield f"  {target!s:<{width}}  <- {first}"
            yield from (f"  {'':<{width}}   + {other}" for other in others)
    for name, reason in sorted(plan.dropped.items()):
        yield f"not converted: {name}: {reason}"
    count = sum(len(file.targets) for file in plan.files)
    yield f"{count} tensors, {plan.nbytes / 1e9:.3f} GB, {len(plan.files)} files; nothing was written (--dry-run)"


def _row(target: Target, source: Source, tensors: Mapping[str, HfTensor]) -> _Row:
    # A source tensor often fills several boxes of a target: each is named once, with the part that all are.
    boxes: dict[tuple[str, str, str], list[Box]] = defaultdict(list)
    facts: dict[tuple[str, str], str] = {}
    for name, piece in target.pieces:
        for fragment in source.fragments(name, piece.hf_box):
            boxes[name, fragment.file, fragment.key].append(fragment.box)
            facts[fragment.file, fragment.key] = f"{list(fragment.shape)} {fragment.stored_as}".rstrip()
    chunk, slash, key = target.key.rpartition("/")
    dtype = str(target.dtype).removeprefix("torch.")
    row = [_Cell(chunk + slash, key, f"{list(target.shape)} {dtype}{' padded' if target.padding else ''}")]
    for (name, file, origin), parts in boxes.items():
        chunk, slash, key = origin.rpartition("/")
        # Of a Megatron tensor with several of them, say which one is meant.
        inner = f" ({name})" if slash and name != target.key else ""
        where = f"{file} {chunk}{slash}" if slash else ""
        row.append(_Cell(where, key + inner, f"{facts[file, origin]}{_part(parts, tensors[name].view)}"))
    return tuple(row)


def _part(boxes: Sequence[Box], view: tuple[int, ...]) -> str:
    hull = tuple(
        (min(start for start, _ in ranges), max(stop for _, stop in ranges)) for ranges in zip(*boxes, strict=True)
    )
    if hull == whole(view):
        return ""
    ranges = (":" if axis == (0, size) else f"{axis[0]}:{axis[1]}" for axis, size in zip(hull, view, strict=True))
    return f" part [{', '.join(ranges)}] of {list(view)}"


def _merged(rows: Iterable[_Row]) -> Iterator[_Row]:
    """Rows that differ in numbers only as one, with the ranges in its names; the others as they are."""
    alike: dict[_Row, list[_Row]] = defaultdict(list)
    for row in rows:
        alike[tuple(replace(cell, name=_NUMBER.sub("{}", cell.name)) for cell in row)].append(row)
    for pattern, group in alike.items():
        numbers = [[int(number) for cell in row for number in _NUMBER.findall(cell.name)] for row in group]
        if (ranges := _ranges(numbers)) is None:
            yield from group
            continue
        left = iter(ranges)
        yield tuple(
            replace(cell, name=cell.name.format(*itertools.islice(left, cell.name.count("{}")))) for cell in pattern
        )


def _ranges(numbers: list[list[int]]) -> list[str] | None:
    """Each column of numbers as a range, where the rows are all combinations of one or more independent ranges."""
    columns = list(zip(*numbers, strict=True))
    # Columns that count up together, as a layer here and there, are one range.
    moves = {tuple(value - min(column) for value in column) for column in columns} - {(0,) * len(numbers)}
    if len(set(zip(*moves, strict=True))) != math.prod(len(set(move)) for move in moves) and moves:
        return None
    words = []
    for column in columns:
        values = sorted(set(column))
        steps = {after - before for before, after in itertools.pairwise(values)}
        if len(steps) > 1:
            return None
        step = steps.pop() if steps else 0
        words.append(
            f"{values[0]}" if not step else f"{{{values[0]}-{values[-1]}{f' step {step}' if step > 1 else ''}}}"
        )
    return words
