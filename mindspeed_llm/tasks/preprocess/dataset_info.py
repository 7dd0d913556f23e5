"""Data set entries: names in `dataset_info.json`, or the same keys given inline, resolved to files and columns."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.json_stream import json_problem
from mindspeed_llm.tasks.preprocess.readers import data_files
from mindspeed_llm.tasks.preprocess.records import FORMATS, RecordLayout

INFO_FILE = "dataset_info.json"

DatasetChoice = str | list[Any] | Mapping[str, Any]
"""The forms of `data.dataset`: names separated by commas, a list of names, or one inline mapping with file_name."""

_OTHER_SOURCES = {
    "script_url": "running a loading script from the net is not supported",
    "cloud_file_name": "reading from object storage is not available yet",
    "hf_hub_url": "loading from a hub is not available yet",
    "ms_hub_url": "loading from a hub is not available yet",
    "om_hub_url": "loading from a hub is not available yet",
}
FORMATTINGS = ("alpaca", "sharegpt", "openai")
"""The values of `formatting`."""

_COLUMN_NAMES = ("prompt", "query", "response", "history", "messages", "system", "tools", "text")
_PREFERENCE_COLUMNS = ("chosen", "rejected")
_KNOWN_KEYS = (
    "file_name", "formatting", "ranking", "subset", "split", "folder", "num_samples", "columns", "tags",
    *_OTHER_SOURCES,
)  # fmt: skip


@dataclass(frozen=True)
class DatasetEntry:
    """One data set: its files, how its records are laid out, and how many samples to draw (None: each once).

    `columns` maps the role of a column to its name in the records, defaults of the format filled in per key.
    """

    name: str
    files: list[Path]
    formatting: str = "alpaca"
    columns: Mapping[str, str | None] = field(default_factory=dict)
    tags: Mapping[str, str | None] = field(default_factory=dict)
    given_columns: tuple[str, ...] = ()
    num_samples: int | None = None
    ranking: bool = False
    """Whether the records are preference pairs."""

    @property
    def layout(self) -> RecordLayout:
        """How the records are read."""
        return RecordLayout(self.formatting, self.columns, self.tags)


def split_names(dataset: DatasetChoice | None) -> list[Any]:
    """Normalise the forms of `data.dataset` to a list: names separated by commas, a list, or one inline mapping."""
    if dataset is None:
        return []
    if isinstance(dataset, Mapping):
        return [dataset]
    items = dataset.split(",") if isinstance(dataset, str) else list(dataset)
    return [item.strip() if isinstance(item, str) else item for item in items if item != ""]


def resolve_datasets(
    dataset: DatasetChoice | None,
    dataset_dir: str | Path,
    *,
    field: str = "data.dataset",
    dir_field: str = "data.dataset_dir",
    preference: bool = False,
) -> list[DatasetEntry]:
    """Resolve the data sets that `field` names to entries with existing files.

    `field` and `dir_field` are the names of the two settings in messages; `preference` allows preference pairs. Raises
    UserError naming the field, the value and the nearest valid name when something does not exist.
    """
    entries: list[DatasetEntry] = []
    for item in split_names(dataset):
        if isinstance(item, str):
            keys = _registered(item, Path(dataset_dir), field, dir_field)
            entries.append(_entry(f"{field}: data set {item!r}", item, keys, Path(dataset_dir), preference))
        elif isinstance(item, Mapping):
            entries += _inline(item, Path(dataset_dir), field, preference)
        else:
            raise UserError(f"{field}: expected a name or a mapping with file_name, found {item!r}")
    return entries


def local_path(name: str | Path, dataset_dir: Path) -> Path:
    """Find a file named in a data set: absolute as it is, else below `dataset_dir`, else below the current folder.

    Raises UserError naming the places that were looked at.
    """
    places = [dataset_dir / name, Path(name)]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        looked = " and ".join(dict.fromkeys(str(place) for place in places))
        raise UserError(f"data set file {str(name)!r} does not exist; looked for {looked}")
    return found


def _registered(name: str, dataset_dir: Path, field: str, dir_field: str) -> Mapping[str, Any]:
    for prefix in ("ONLINE", "REMOTE:"):
        if str(dataset_dir).startswith(prefix):
            raise UserError(f"{dir_field} {str(dataset_dir)!r}: loading from a hub is not available yet")
    info_file = dataset_dir / INFO_FILE
    if not info_file.is_file():
        raise UserError(
            f"{field} names {name!r}, but {info_file} does not exist; set {dir_field} to the folder of "
            f"{INFO_FILE}" + (f", or give {field} as a mapping with file_name" if field.startswith("data.") else "")
        )
    try:
        info = json.loads(info_file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{info_file}:{error.lineno}: not valid JSON ({json_problem(error)} column {error.colno})"
        ) from error
    if name not in info:
        near = difflib.get_close_matches(name, info, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(info))}"
        raise UserError(f"{field}: {name!r} is not in {info_file}{hint}")
    return info[name]


def _inline(keys: Mapping[str, Any], dataset_dir: Path, field: str, preference: bool) -> list[DatasetEntry]:
    file_name = keys.get("file_name")
    names = file_name if isinstance(file_name, list) else [file_name]
    if isinstance(file_name, str) and "," in file_name and not Path(file_name).exists():
        names = [part.strip() for part in file_name.split(",")]
    return [_entry(field, str(name), {**keys, "file_name": name}, dataset_dir, preference) for name in names]


def _entry(where: str, name: str, keys: Mapping[str, Any], dataset_dir: Path, preference: bool) -> DatasetEntry:
    for key in keys:
        if key not in _KNOWN_KEYS:
            near = difflib.get_close_matches(key, _KNOWN_KEYS, n=1)
            raise UserError(f"{where}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if keys.get("file_name") is None:
        reason = next((text for key, text in _OTHER_SOURCES.items() if keys.get(key)), "it has no file_name")
        raise UserError(f"{where}: {reason}; put the files on disk and name them with file_name")
    ranking = bool(keys.get("ranking"))
    if ranking and not preference:
        raise UserError(f"{where}: ranking is true, but preference pairs cannot be used for pt or sft")
    for key in ("subset", "folder"):
        if keys.get(key):
            raise UserError(f"{where}: {key} applies to hub data sets; name the file or folder itself with file_name")
    if keys.get("split") not in (None, "train"):
        raise UserError(f"{where}: split {keys['split']!r}: local files have only the split 'train'")
    formatting = keys.get("formatting", "alpaca")
    if formatting not in FORMATTINGS:
        raise UserError(f"{where}: formatting {formatting!r}; expected one of {', '.join(FORMATTINGS)}")
    for key in keys.get("columns") or {}:
        if key == "kto_tag":
            raise UserError(f"{where}: column 'kto_tag': single replies marked good or bad are not supported")
        if key in _PREFERENCE_COLUMNS and not ranking:
            advice = "so ranking must be true" if preference else "which pt and sft cannot use"
            raise UserError(f"{where}: column {key!r} belongs to preference data, {advice}")
    known = _COLUMN_NAMES + _PREFERENCE_COLUMNS if ranking else _COLUMN_NAMES
    columns, given = _merged(where, "columns", keys, {**FORMATS[formatting].columns, "text": "text"}, known)
    tags, _ = _merged(where, "tags", keys, FORMATS[formatting].tags, tuple(FORMATS["sharegpt"].tags))
    num_samples = keys.get("num_samples")
    if num_samples is not None and (not isinstance(num_samples, int) or num_samples < 1):
        raise UserError(f"{where}: num_samples {num_samples!r}; expected a positive number")
    files = data_files(local_path(keys["file_name"], dataset_dir))
    return DatasetEntry(name, files, formatting, columns, tags, given, num_samples, ranking)


def _merged(
    where: str, section: str, keys: Mapping[str, Any], defaults: Mapping[str, str | None], known: tuple[str, ...]
) -> tuple[dict[str, str | None], tuple[str, ...]]:
    """Fill the given mapping up with the defaults key by key; null switches one column off."""
    given = keys.get(section) or {}
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; expected one of {', '.join(known)}"
            raise UserError(f"{where}: unknown key {key!r} in {section}{hint}")
    return {**defaults, **given}, tuple(key for key in given if given[key] is not None)
