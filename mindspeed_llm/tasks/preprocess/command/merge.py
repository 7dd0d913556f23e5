"""`--merge-group-keys`: parts that earlier runs have made become one set of files."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Summary
from mindspeed_llm.tasks.preprocess.command.identity import differences, hash_of
from mindspeed_llm.tasks.preprocess.command.job import FORMAT
from mindspeed_llm.tasks.preprocess.command.publish import naming_the_folder, publish
from mindspeed_llm.tasks.preprocess.command.workspace import Workspace, write_json
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, IndexedWriter, bin_file, idx_file
from mindspeed_llm.tasks.preprocess.sample_store import read_summary, summary_file

_LOG = logging.getLogger("mindspeed_llm")
# What must be the same in the summaries of all parts, so that they can be read as one; of the tokenizer its identity.
_SAME = ("kind", "level", "pack", "neat_pack", "tokenizer")
# What the summary of the whole says where all parts say the same.
_COMMON = ("handler", "kind", "level", "prompt_type", "seq_length", "pack", "neat_pack")


def find_parts(folder: Path, keys: Sequence[str], target: Path) -> dict[str, list[Path]]:
    """For each key, the prefixes of its parts in `folder` in natural order of their names (part2 before part10).

    A part is a pair of files <name>_<key>.bin/.idx; files of `target` itself are none. Raises UserError: no parts, a
    pair that is not complete, or keys that do not have the same parts.
    """
    if not folder.is_dir():
        raise UserError(f"--input {folder}: --merge-group-keys needs the folder that holds the parts")
    names: dict[str, list[str]] = {}
    for key in keys:
        ending = f"_{key}"
        stems = {
            suffix: {
                file.stem.removesuffix(ending)
                for file in folder.iterdir()
                if file.suffix == suffix and file.stem.endswith(ending) and not file.name.startswith(".")
            }
            for suffix in (".bin", ".idx")
        }
        if folder.resolve() == target.parent.resolve():
            stems = {suffix: found - {target.name} for suffix, found in stems.items()}
        for suffix, other in ((".bin", ".idx"), (".idx", ".bin")):
            for name in sorted(stems[suffix] - stems[other]):
                raise UserError(f"{folder / name}{ending}{suffix} has no {other} beside it")
        if not stems[".idx"]:
            raise UserError(f"--merge-group-keys {key}: {folder} holds no files <name>_{key}.bin/.idx")
        names[key] = sorted(stems[".idx"], key=_natural)
    first = keys[0]
    for key in keys[1:]:
        for name in sorted(set(names[first]) ^ set(names[key])):
            there, missing = (first, key) if name in names[first] else (key, first)
            raise UserError(f"{folder}: part {name} has {there}, but no {missing}; merge keys that all parts have")
    return {key: [folder / f"{name}_{key}" for name in names[key]] for key in keys}


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(word.isdecimal(), int(word) if word.isdecimal() else 0, word) for word in re.split(r"(\d+)", name)]


def check_parts(parts: Mapping[str, Sequence[Path]]) -> None:
    """Open all parts. Raises UserError: a damaged file, another type of ids, or keys of a sample that do not fit."""
    for prefixes in zip(*parts.values(), strict=True):
        sizes = {}
        for key, prefix in zip(parts, prefixes, strict=True):
            reader = IndexedReader(prefix)
            first = IndexedReader(parts[key][0])
            if reader.dtype != first.dtype:
                raise UserError(
                    f"{prefix} holds {reader.dtype}, but {first.prefix} {first.dtype}; they cannot be merged"
                )
            used = int(reader.lengths.sum(dtype="int64")) * reader.dtype.itemsize
            if bin_file(prefix).stat().st_size != used:
                raise UserError(f"{bin_file(prefix)} is damaged: its index speaks of {used} bytes")
            if key.startswith("packed_"):
                sizes[key] = len(reader)
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{key}: {size}" for key, size in sizes.items())
            raise UserError(f"the keys of {prefixes[0].parent} part {prefixes[0].name} differ in samples ({found})")


def merge(folder: Path, keys: Sequence[str], prefix: Path) -> list[str]:
    """Merge the parts of `folder` to <prefix>_<key>; returns lines that say what was done."""
    parts = find_parts(folder, keys, prefix)
    check_parts(parts)
    names = [part.name.removesuffix(f"_{keys[0]}") for part in parts[keys[0]]]
    summary = merged_summary([folder / name for name in names], keys)
    with naming_the_folder(prefix), Workspace(prefix) as workspace:
        workspace.begin({"merge": names})
        made = {}
        for key, prefixes in parts.items():
            finished = workspace.folder / key
            with IndexedWriter(finished, IndexedReader(prefixes[0]).dtype) as writer:
                for part in prefixes:
                    writer.add_file(IndexedReader(part))
            made[prefix.with_name(f"{prefix.name}_{key}")] = finished
        write_json(workspace.folder / "summary.json", summary)
        publish(prefix, made, workspace.folder / "summary.json")
    lines = [f"merged {len(names)} parts: {', '.join(names)}"]
    for final in made:
        reader = IndexedReader(final)
        size = bin_file(final).stat().st_size + idx_file(final).stat().st_size
        lines.append(f"  {final}.bin/.idx  {len(reader)} sequences, {size} bytes")
    return lines


def merged_summary(prefixes: Sequence[Path], keys: Sequence[str]) -> dict[str, Any]:
    """The summary of the whole: what the parts have in common, and their counts added up.

    Parts without a summary of their own (made by another program) leave counts that are too low; a line says so.
    Raises UserError where the parts are of different kinds, or were made with different tokenizers.
    """
    contents = {
        prefix: json.loads(summary_file(prefix).read_text(encoding="utf-8"))
        for prefix in prefixes
        if summary_file(prefix).is_file()
    }
    summary = Summary()
    for prefix in contents:
        summary.add_summary(read_summary(prefix))
    _check_same(contents)
    first: Mapping[str, Any] = next(iter(contents.values()), {})
    common = {
        name: first[name]
        for name in _COMMON
        if name in first and all(content.get(name) == first[name] for content in contents.values())
    }
    if "tokenizer" in first:
        # Equal in what it does; where it lies may differ.
        common["tokenizer"] = first["tokenizer"]
    if len(contents) < len(prefixes):
        _LOG.warning(
            "%d of %d parts have no summary; the counts of the merged one are of the others",
            len(prefixes) - len(contents),
            len(prefixes),
        )
    inputs = [item for content in contents.values() for item in content.get("inputs", [])]
    hashes = [content.get("inputs_hash") for content in contents.values()]
    merged_from = {"merged": [str(prefix) for prefix in prefixes], "inputs": inputs, "inputs_hash": hash_of(hashes)}
    return {"format": FORMAT, **common, "keys": [_bare(key) for key in keys], **merged_from, **asdict(summary)}


def _check_same(contents: Mapping[Path, Mapping[str, Any]]) -> None:
    def deciding(content: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: content[name] for name in _SAME if name in content}
        return found | ({"tokenizer": found["tokenizer"].get("identity")} if "tokenizer" in found else {})

    for first, second in itertools.pairwise(contents):
        if different := differences(deciding(contents[first]), deciding(contents[second])):
            raise UserError(f"{first} and {second} cannot be read as one ({'; '.join(different)})")


def _bare(key: str) -> str:
    """The key of a sample or the column of text in a key as file names have it."""
    return key.removeprefix("packed_").removesuffix("_document").removesuffix("_sentence")
