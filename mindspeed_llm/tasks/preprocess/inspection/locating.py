"""Which indexed files belong to a data set that the user names: by its prefix, or by one of its files.

alpaca_packed_input_ids_document.idx     prefix alpaca, key input_ids, of samples
alpaca_packed_labels_document.idx        prefix alpaca, key labels, of samples
enwiki_text_document.idx                 prefix enwiki, key text
alpaca_summary.json                      the summary of prefix alpaca
"""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.sample_store import summary_file

_LEVELS = ("document", "sentence")
_SAMPLE_NAME = re.compile(rf"(?P<prefix>.*)_packed_(?P<key>.+)_(?P<level>{'|'.join(_LEVELS)})")
_TEXT_NAME = re.compile(rf"(?P<prefix>.+)_(?P<key>[^_]+)_(?P<level>{'|'.join(_LEVELS)})")
_MOST_LISTED = 20


@dataclass(frozen=True)
class Location:
    """A data set on disk: prefixes of indexed files by key. `is_text`: its keys are columns of text, each complete in
    itself, not the parts of samples."""

    prefix: Path
    files: Mapping[str, Path]
    is_text: bool
    summary: Mapping[str, Any] | None = None

    def describe(self) -> str:
        """One line for a list."""
        return f"{self.prefix} ({'text' if self.is_text else 'samples'}: {', '.join(self.files)})"


def locate(name: str | Path) -> Location:
    """Find the data set that `name` stands for: its prefix, one of its files with or without ending, its summary, or
    a folder with one data set. Raises UserError where there is none or more than one, and says what there is."""
    given = Path(name)
    folder, wanted = (given, "") if given.is_dir() else (given.parent, _without_ending(given.name))
    if not folder.is_dir():
        raise UserError(f"--inspect {name}: the folder {folder} does not exist")
    found = _data_sets(folder)
    matches = _matches(found, folder, wanted) if wanted else found
    if len(matches) == 1:
        match = matches[0]
        return match if match.summary is None else replace(match, summary=_read_summary(match.prefix))
    if not matches:
        raise UserError(f"--inspect {name}: no data set has this name; {_listing(found, folder, wanted)}")
    shown = "\n  ".join(match.describe() for match in matches[:_MOST_LISTED])
    raise UserError(
        f"--inspect {name} may be {len(matches)} data sets; name a file of the one that is meant:\n  {shown}"
    )


def _without_ending(name: str) -> str:
    for ending in (".bin", ".idx", "_summary.json"):
        if name.endswith(ending) and name != ending:
            return name.removesuffix(ending)
    return name


def _matches(found: list[Location], folder: Path, wanted: str) -> list[Location]:
    # A single file: of samples it stands for the whole, of text for itself.
    for name in (wanted, *(f"{wanted}_{level}" for level in _LEVELS)):
        file = folder / name
        for data_set in found:
            key = next((key for key, path in data_set.files.items() if path == file), None)
            if key is not None:
                files = {key: file} if data_set.is_text else data_set.files
                return [Location(data_set.prefix, files, data_set.is_text, data_set.summary)]
    for name in (wanted, wanted.removesuffix("_packed")):
        named = [data_set for data_set in found if data_set.prefix == folder / name]
        if len(named) > 1:
            # Of several under one prefix, the summary knows which was written last.
            named = [one for one in named if one.summary is not None and set(one.files) == _keys(one.summary)] or named
        if named:
            return named
    # A column whose name has underscores, without a summary that says so.
    return [
        Location(folder / wanted, {path.name.removeprefix(f"{wanted}_").rpartition("_")[0]: path}, True)
        for data_set in found
        if data_set.is_text and data_set.summary is None
        for path in data_set.files.values()
        if path.name.startswith(f"{wanted}_")
    ]


def _data_sets(folder: Path) -> list[Location]:
    """All data sets of a folder, sorted by name."""
    names = sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
    prefixes = [name.removesuffix("_summary.json") for name in names if name.endswith("_summary.json")]
    summaries = {prefix: _readable_summary(folder / prefix) for prefix in prefixes}
    indexed = sorted({name[: -len(".bin")] for name in names if name.endswith((".bin", ".idx"))})
    groups: dict[tuple[str, str, bool], dict[str, Path]] = {}
    for name in indexed:
        prefix, key, level, is_text = _parts(name, summaries)
        groups.setdefault((prefix, level, is_text), {})[key] = folder / name
    return [
        Location(folder / prefix, files, is_text, summaries.get(prefix))
        for (prefix, _, is_text), files in sorted(groups.items())
    ]


def _parts(name: str, summaries: Mapping[str, Mapping[str, Any]]) -> tuple[str, str, str, bool]:
    """(prefix, key, level, whether it is text) of the name of an indexed file."""
    match = _SAMPLE_NAME.fullmatch(name)
    if match and match["key"] != "text":
        return match["prefix"], match["key"], match["level"], False
    if match := _TEXT_NAME.fullmatch(name):
        body = name.removesuffix(f"_{match['level']}")
        owners = [prefix for prefix, summary in summaries.items() if body in {f"{prefix}_{k}" for k in _keys(summary)}]
        prefix = max(owners, key=len, default=match["prefix"])
        return prefix, body.removeprefix(f"{prefix}_"), match["level"], True
    return name, "text", "", True


def _readable_summary(prefix: Path) -> Mapping[str, Any]:
    """The summary; empty where it is damaged, which matters only for the data set that is meant."""
    try:
        return _read_summary(prefix)
    except UserError:
        return {}


def _read_summary(prefix: Path) -> Mapping[str, Any]:
    file = summary_file(prefix)
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}); preprocess the data again, or remove it") from error
    if not isinstance(summary, dict):
        raise UserError(f"{file} is damaged: it holds no object; preprocess the data again, or remove it")
    return summary


def _keys(summary: Mapping[str, Any]) -> set[str]:
    return set(summary.get("keys") or ())


def _listing(found: list[Location], folder: Path, wanted: str) -> str:
    if not found:
        return f"{folder} holds no indexed files (.bin, .idx)"
    near = difflib.get_close_matches(wanted, [data_set.prefix.name for data_set in found], n=1, cutoff=0.5)
    hint = f"did you mean {folder / near[0]}? " if near else ""
    lines = [data_set.describe() for data_set in found[:_MOST_LISTED]]
    more = [f"and {len(found) - _MOST_LISTED} more"] if len(found) > _MOST_LISTED else []
    return f"{hint}{folder} holds:\n  " + "\n  ".join([*lines, *more])
