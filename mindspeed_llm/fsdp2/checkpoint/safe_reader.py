"""Reading torch.distributed.checkpoint files without executing anything that they hold.

The library unpickles `.metadata`, and every entry that is no tensor, with the plain unpickler, which runs whatever
the file asks for. Here the metadata goes through an unpickler that knows the few classes such a file consists of, and
entries that are no tensors do not exist: the trainer writes none, and a file that has some is refused.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from mindspeed_llm.fsdp2.checkpoint.manifest import METADATA, DamagedCheckpoint

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
_ALLOWED = frozenset(
    {("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES}
    | {
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
    if not isinstance(metadata, Metadata):
        raise DamagedCheckpoint(f"{path} holds no checkpoint metadata")
    return metadata


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


def refused_class(error: pickle.UnpicklingError) -> str:
    """What torch's weights-only unpickler refused, without its advice to load the file all the same."""
    text = " ".join(str(error).split())
    named = re.search(r"GLOBAL (\S+)", text)
    if named is None:
        return f"is damaged or malicious and was not loaded ({text[:200]})"
    return f"asks for {named[1]}, which no checkpoint needs: the file is damaged or malicious and was not loaded"


def load_plain(path: Path, stream: IO[bytes] | None = None) -> Any:
    """Load a file of plain values and tensors that `torch.save` wrote; from `stream`, where that is a part of `path`.

    Raises:
        UnsafeFile: it asks for a class; the text names it.
        DamagedCheckpoint: it is missing or damaged.
    """
    try:
        return torch.load(path if stream is None else stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeFile(f"{path} {refused_class(error)}") from error
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except Exception as error:  # a damaged file raises nearly anything
        raise DamagedCheckpoint(f"{path} cannot be read ({type(error).__name__}: {error})") from error
