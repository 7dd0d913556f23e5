"""Reading torch.distributed.checkpoint files without executing anything that they hold.

The library unpickles `.metadata`, and every entry that is no tensor, with the plain unpickler, which runs whatever
the file asks for. Here the metadata goes through an unpickler that knows the few classes such a file consists of, and
entries that are no tensors do not exist: the trainer writes none, and a file that has some is refused.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from mindspeed_llm.checkpoints.files import METADATA, DamagedCheckpoint

_METADATA_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
# megatron-core keeps the plans of all ranks in the metadata, for the next save.
_PLAN_CLASSES = ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
_ALLOWED = frozenset(
    {("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES}
    | {("torch.distributed.checkpoint.planner", name) for name in _PLAN_CLASSES}
    | {
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib._local", "PosixPath"),
    }
    | {("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
)


# What torch advises, and nobody should do.
_ADVICE = re.compile(r"weights_only|safe_globals|[Rr]e-running")


class UnsafeFile(DamagedCheckpoint):
    """A file that asks for something to be imported which a checkpoint has no use for."""


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BufferedIOBase, path: Path) -> None:
        super().__init__(stream)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise UnsafeFile(
                f"{self._path} asks for {module}.{name}, which no checkpoint needs: the file is damaged or malicious "
                "and was not loaded"
            )
        return super().find_class(module, name)


class SafeFileSystemReader(FileSystemReader):
    """torch's reader with a restricted unpickler for the metadata; tensors are read with `weights_only=True` anyway."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file by file, so that what is wrong with one is said with its name.

        Raises:
            UnsafeFile: a file asks for a class.
            DamagedCheckpoint: a file does not hold what the metadata says.
            FileNotFoundError: a file is missing.
        """
        folder, per_file = Path(self.path), {}
        for item in plan.items:
            place = self.storage_data.get(item.storage_index)
            if place is None:
                raise DamagedCheckpoint(f"{folder / METADATA} does not say where {item.storage_index.fqn} lies")
            per_file.setdefault(file_of(place, folder), []).append(item)
        for name, items in per_file.items():
            with naming(folder / name):
                super().read_data(replace(plan, items=items), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class TensorsOnlyPlanner(DefaultLoadPlanner):
    """torch's planner, which would unpickle an entry that is no tensor; this one refuses it."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise UnsafeFile(f"entry {read_item.dest_index.fqn} of the checkpoint is no tensor; it was not loaded")


def read_metadata(folder: Path) -> Metadata:
    """The `.metadata` of a checkpoint.

    Raises:
        UnsafeFile: it asks for a class that it has no use for; names the class.
        DamagedCheckpoint: it is missing or no pickle.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as stream:
            metadata = _RestrictedUnpickler(stream, path).load()
    except DamagedCheckpoint:
        raise
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DamagedCheckpoint(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise DamagedCheckpoint(f"{path} holds no checkpoint metadata")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, BytesStorageMetadata) and not _is_tensor_entry(entry):
            raise DamagedCheckpoint(f"{path}: entry {name} is no description of a tensor")
    places = metadata.storage_data
    if not isinstance(places, dict) or not all(isinstance(place, _StorageInfo) for place in places.values()):
        raise DamagedCheckpoint(f"{path} does not say where the tensors lie")
    return metadata


def _is_tensor_entry(entry: object) -> bool:
    return (
        isinstance(entry, TensorStorageMetadata)
        and _is_shape(entry.size)
        and isinstance(getattr(entry.properties, "dtype", None), torch.dtype)
        and isinstance(entry.chunks, list)
        and all(_is_shape(chunk.offsets) and _is_shape(chunk.sizes) for chunk in entry.chunks)
    )


def _is_shape(sizes: object) -> bool:
    return isinstance(sizes, torch.Size) and all(size >= 0 for size in sizes)


def file_of(place: _StorageInfo, folder: Path) -> str:
    """The name of the file that holds a piece, as the metadata gives it; anybody may have written that.

    Raises:
        DamagedCheckpoint: it is no file of the directory itself.
    """
    name = place.relative_path
    if not isinstance(name, str) or Path(name).name != name:
        raise DamagedCheckpoint(f"{folder / METADATA} names {name}, which is not a file of this directory")
    return name


def tensor_entries(metadata: Metadata, folder: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors of a checkpoint by name.

    Raises:
        UnsafeFile: it holds entries that are no tensors; names the first.
    """
    others: Iterable[str] = (
        name for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)
    )
    if (first := next(iter(others), None)) is not None:
        raise UnsafeFile(f"{folder / METADATA}: entry {first} is no tensor, and loading it would run what it holds")
    return dict(metadata.state_dict_metadata)  # type: ignore[arg-type]


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of torch's reading become errors that name `path`; the library's remarks on odd files are not shown.

    Raises:
        UnsafeFile: it asks for a class; the text names it.
        DamagedCheckpoint: it cannot be read.
        FileNotFoundError: it is missing.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (DamagedCheckpoint, FileNotFoundError):
        raise
    except pickle.UnpicklingError as error:
        raise UnsafeFile(f"{path} {_refusal(error)}") from error
    except Exception as error:  # a damaged file raises nearly anything
        reason = " ".join(str(error).split())
        if _ADVICE.search(reason):
            reason = "it holds no tensors as torch.save writes them"
        raise DamagedCheckpoint(f"{path} cannot be read ({type(error).__name__}: {reason})") from error


def _refusal(error: pickle.UnpicklingError) -> str:
    """What torch's weights-only unpickler refused, without its advice to load the file all the same."""
    text = " ".join(str(error).split())
    named = re.search(r"(?:GLOBAL|unsupported class|but got) (?:<class ')?([\w.]+)", text)
    if named is not None:
        return f"asks for {named[1]}, which no checkpoint needs: the file is damaged or malicious and was not loaded"
    reason = re.search(r"WeightsUnpickler error: (.*?)(?: Check the documentation|$)", text)
    reason_text = (
        reason[1] if reason and not _ADVICE.search(reason[1]) else "it holds more than tensors and plain values"
    )
    return f"is damaged or malicious and was not loaded ({reason_text[:200]})"


def load_plain(path: Path, stream: IO[bytes] | None = None) -> Any:
    """Load a file of plain values and tensors that `torch.save` wrote; from `stream`, where that is a part of `path`.

    Raises:
        UnsafeFile: it asks for a class; the text names it.
        DamagedCheckpoint: it is missing or damaged.
    """
    try:
        with naming(path):
            return torch.load(path if stream is None else stream, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None


def first_cause(failure: CheckpointException) -> str:
    """What the first of the ranks that failed says: "failed on rank 1: ..."."""
    rank, (cause, _) = sorted(failure.failures.items())[0]
    while not isinstance(cause, DamagedCheckpoint) and cause.__cause__ is not None:
        cause = cause.__cause__
    text = str(cause) if isinstance(cause, DamagedCheckpoint) else f"{type(cause).__name__}: {cause}"
    return f"failed on rank {rank}: {text}"
