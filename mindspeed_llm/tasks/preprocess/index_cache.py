"""Indices on disk: built once, named by all that decides them, and memory-mapped by whoever needs them.

An index is some arrays, `<name>_<key>_<array>.npy`, and `<name>_<key>.json`, which is written last and holds the key,
shapes and checksums. The key is a hash of the content that the index was made of, so that data which were made anew
under an old name never meet an index of the old ones, whatever their time stamps say.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import hash_ends, hash_file
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, bin_file, idx_file, temporary_name

_LOG = logging.getLogger("mindspeed_llm")

_FORMAT = 1
# Of the data set's name; file systems allow 255 bytes.
_NAME_LENGTH = 100

Arrays = Mapping[str, np.ndarray]
BuildOnce = Callable[[Callable[[], bool], Callable[[], None]], None]
"""Called by every process of a job with (exists, build): one of them, or one of each node, calls `build` unless
`exists()` is true, while the others wait."""


def build_here(exists: Callable[[], bool], build: Callable[[], None]) -> None:
    """The `BuildOnce` of a job of one process."""
    if not exists():
        build()


class HoldsMaps:
    """Base of classes whose attributes may be whole arrays of the cache: other processes get these as names of files
    and map them themselves, where copies would take the index's size in memory for each."""

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: _MappedFile(str(value.filename)) if isinstance(value, np.memmap) else value
            for name, value in vars(self).items()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self.__dict__[name] = _map(value.name) if isinstance(value, _MappedFile) else value


@dataclass(frozen=True)
class _MappedFile:
    name: str


def _map(file: str | Path) -> np.memmap:
    return np.load(file, mmap_mode="r", allow_pickle=False)


@dataclass(frozen=True)
class IndexRequest:
    """An index: the beginning of its file names, the data set it belongs to, all that decides its content, and how it
    is built."""

    name: str
    prefix: Path
    key: Mapping[str, Any]
    build: Callable[[], Arrays]

    @functools.cached_property
    def stem(self) -> str:
        """The file names' common beginning."""
        text = json.dumps({"format": _FORMAT, **self.key}, sort_keys=True)
        return f"{self.name[:_NAME_LENGTH]}_{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def index_identity(reader: IndexedReader) -> dict[str, Any]:
    """What tells an indexed file from another: the content of its `.idx` (lengths, offsets, type, documents), and the
    size and both ends of its `.bin`; neither name nor time.

    An order of samples follows from the `.idx` alone, so that it is right even for data that differ in the middle of
    the `.bin` only.
    """
    data = bin_file(reader.prefix)
    return {"idx": hash_file(idx_file(reader.prefix)), "bin_size": data.stat().st_size, "bin_ends": hash_ends(data)}


class IndexCache:
    """Indices in a folder of the user's choice, or in `cache` beside the data, or where that cannot be written in
    `fallback`.

    `build_once` sees to it that one process builds.
    """

    def __init__(
        self, folder: Path | None = None, *, fallback: Path | None = None, build_once: BuildOnce = build_here
    ) -> None:
        self._folder, self._fallback, self._build_once = folder, fallback, build_once

    def arrays(self, requests: Sequence[IndexRequest]) -> list[Arrays]:
        """The indices, read-only maps of their files; those that are missing or damaged are built and written.

        Every process of the job must call this with the same requests. Raises UserError when no folder can be written,
        or when this process does not see what another one has built.
        """
        wanted = {request.stem: request for request in requests}
        found: dict[str, Arrays] = {}

        def exists() -> bool:
            for stem, request in wanted.items():
                arrays = found.get(stem) or self._find(request)
                if arrays is not None:
                    found[stem] = arrays
            return len(found) == len(wanted)

        def build() -> None:
            for stem, request in wanted.items():
                if stem not in found:
                    found[stem] = self._write(request, request.build())

        self._build_once(exists, build)
        if not exists():
            missing = next(request for stem, request in wanted.items() if stem not in found)
            raise UserError(
                f"the sample index {missing.stem} of {missing.prefix} was built, but cannot be seen from here; looked "
                f"in {' and '.join(map(str, self._folders(missing)))}. Use storage that all nodes share, or let one "
                "process of every node build it"
            )
        return [found[request.stem] for request in requests]

    def _folders(self, request: IndexRequest) -> list[Path]:
        if self._folder is not None:
            return [self._folder]
        folders = [request.prefix.parent / "cache"]
        if self._fallback is not None and self._fallback not in folders:
            folders.append(self._fallback)
        return folders

    def _find(self, request: IndexRequest) -> Arrays | None:
        for folder in self._folders(request):
            description = folder / f"{request.stem}.json"
            try:
                return _load(description)
            except FileNotFoundError:
                if description.exists():
                    _LOG.warning("index %s is damaged: a file of it is missing; building it again", description)
            except (ValueError, KeyError, TypeError, OSError) as error:
                _LOG.warning("index %s is damaged: %s; building it again", description, error)
        return None

    def _write(self, request: IndexRequest, arrays: Arrays) -> Arrays:
        folders = self._folders(request)
        for folder in folders:
            try:
                _save(folder / f"{request.stem}.json", request.key, arrays)
                return _load(folder / f"{request.stem}.json")
            except OSError as error:
                problem = f"{folder}: the sample index cannot be written ({error.strerror or error})"
                if folder is folders[-1]:
                    raise UserError(f"{problem}; make it writable, or choose another folder for the index") from error
                _LOG.info("%s; using %s", problem, folders[folders.index(folder) + 1])
        raise AssertionError("there is always a folder")


def _array_file(description: Path, name: str) -> Path:
    return description.with_name(f"{description.stem}_{name}.npy")


def _save(description: Path, key: Mapping[str, Any], arrays: Arrays) -> None:
    """Write the arrays, then the description, each under a temporary name first."""
    description.parent.mkdir(parents=True, exist_ok=True)
    facts = {}
    for name, array in arrays.items():
        file = _array_file(description, name)
        temporary = temporary_name(file)
        try:
            with temporary.open("wb") as stream:
                np.save(stream, array, allow_pickle=False)
            facts[name] = {"shape": list(array.shape), "dtype": array.dtype.str, "xxh3": hash_file(temporary)}
            # Where another node has just written the same, its processes may have mapped it: it stays.
            if not (file.is_file() and hash_file(file) == facts[name]["xxh3"]):
                temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
    temporary = temporary_name(description)
    try:
        temporary.write_text(json.dumps({"key": key, "arrays": facts}, indent=2), encoding="utf-8")
        temporary.replace(description)
    finally:
        temporary.unlink(missing_ok=True)


def _load(description: Path) -> Arrays:
    """Map the arrays. Raises FileNotFoundError, or ValueError naming the file that is not as it was written."""
    facts = json.loads(description.read_text(encoding="utf-8"))["arrays"]
    arrays = {}
    for name, fact in facts.items():
        file = _array_file(description, name)
        if hash_file(file) != fact["xxh3"]:
            raise ValueError(f"{file.name} is not what was written")
        arrays[name] = _map(file)
    return arrays
