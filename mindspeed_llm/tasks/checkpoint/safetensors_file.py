"""The safetensors format: which tensors go into which file, and where they lie in it.

8 bytes: length of the header | header: JSON, name -> dtype, shape, place of the bytes | bytes of all tensors
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Which tensor goes into which file: (file name, tensor names in order) and the total size in bytes."""

    files: list[tuple[str, list[str]]]
    total_size: int


def plan_shards(sizes: Mapping[str, int], shard_size: int) -> ShardPlan:
    """Fill files in the order of `sizes` (bytes per tensor) up to `shard_size` bytes; a larger tensor gets its own
    file.
    """
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > shard_size:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    if len(shards) == 1:
        files = [("model.safetensors", shards[0])]
    else:
        files = [(f"model-{i:05d}-of-{len(shards):05d}.safetensors", names) for i, names in enumerate(shards, start=1)]
    return ShardPlan(files=files, total_size=sum(sizes.values()))


def index_text(plan: ShardPlan) -> str:
    """The text of `model.safetensors.index.json` for these files."""
    file_of = {name: file for file, names in plan.files for name in names}
    index = {"metadata": {"total_size": plan.total_size}, "weight_map": dict(sorted(file_of.items()))}
    return json.dumps(index, indent=2) + "\n"


def header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[bytes, dict[str, int], int]:
    """The start of a file of these tensors (dtype, shape), each tensor's place in the file, and the file's size."""
    # Wide types first, so that every tensor lies at a multiple of its own width.
    names = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in names:
        dtype, shape = tensors[name]
        size = dtype.itemsize
        for length in shape:
            size *= length
        offsets[name], end = end, end + size
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start = 8 + len(text)
    return (
        len(text).to_bytes(8, "little") + text,
        {name: start + offset for name, offset in offsets.items()},
        start + end,
    )


@dataclass(frozen=True, kw_only=True)
class HeaderEntry:
    """What a header says of one tensor."""

    dtype: str
    """As the header spells it; perhaps none of `DTYPES`."""
    shape: tuple[int, ...]
    start: int
    """Where its bytes begin, counted from the end of the header."""
    end: int


def read_header(text: bytes) -> dict[str, HeaderEntry]:
    """The tensors of a file by its header, under the rules of the format: their bytes follow each other without
    overlap or hole, and each has as many as its shape and type need.

    Raises:
        ValueError: the header breaks a rule; says which, and the tensor.
    """
    header = json.loads(text, object_pairs_hook=_without_repeats)
    if not isinstance(header, dict):
        raise ValueError(f"it is a {type(header).__name__}, expected an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ is no object of texts")
    entries = {name: _entry(name, entry) for name, entry in header.items()}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            what = "overlap those of another tensor" if entry.start < end else f"begin after a hole at {end}"
            raise ValueError(f"the bytes {entry.start} to {entry.end} of {name} {what}")
        end = entry.end
    return entries


def _entry(name: str, entry: Any) -> HeaderEntry:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{name} lacks one of dtype, shape, data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _are_counts(shape):
        raise ValueError(f"the shape {shape} of {name} is no list of whole numbers")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"the data_offsets {offsets} of {name} are no two whole numbers")
    if isinstance(dtype, str) and dtype in DTYPES:
        count = math.prod(shape) * DTYPES[dtype].itemsize
        if offsets[1] - offsets[0] != count:
            raise ValueError(f"{name} has {offsets[1] - offsets[0]} bytes, {shape} of {dtype} are {count}")
    return HeaderEntry(dtype=str(dtype), shape=tuple(shape), start=offsets[0], end=offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ValueError(f"{twice} is in it twice")
    return found
