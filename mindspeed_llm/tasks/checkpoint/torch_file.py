"""Files of `torch.save`, read as data: nothing that they hold is executed.

torch's own weights-only loader knows pickle protocol 2 only, and Megatron checkpoints are often written with protocol
4; so the pickle inside is read here, by an unpickler that knows the few names below. A tensor becomes a view of the
mapped file. Classes of Megatron that stand in a checkpoint's arguments become inert objects: their code is not needed,
and Megatron need not be installed.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.mapped_file import MappedFile

_LOCAL_HEADER = 30
"""Bytes of a zip entry's header before the name; the lengths of name and extra field stand at its end."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies in a file."""

    file: MappedFile
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self) -> torch.Tensor:
        """The tensor, as a view of the file."""
        return self.file.tensor(self.offset, self.dtype, self.shape, self.stride)


class Inert:
    """Stands for an object of a class whose code is not wanted; keeps what the pickle said about it."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *values: Any) -> Inert:
        return self

    def append(self, value: Any) -> None:
        """Pickled lists and their subclasses are filled by this call."""

    def extend(self, values: Any) -> None:
        """As `append`, for several."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Pickled dictionaries and their subclasses are filled by this call."""


# Found in the arguments, the random states and the optimizer's bookkeeping of checkpoints that training wrote.
_INERT = {
    ("megatron.core.enums", "ModelType"),
    ("megatron.core.enums", "Fp8Recipe"),
    ("megatron.core.transformer.enums", "AttnBackend"),
    ("megatron.core.transformer.enums", "AttnMaskType"),
    ("megatron.core.transformer.enums", "CudaGraphScope"),
    ("megatron.core.transformer.enums", "LayerType"),
    ("megatron.core.transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout"),
    ("megatron.core.rerun_state_machine", "RerunMode"),
    ("megatron.core.rerun_state_machine", "RerunState"),
    ("megatron.core.rerun_state_machine", "RerunDiagnostic"),
    ("signal", "Signals"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    # How some versions of Python pickle the members of an enumeration. The real one could reach anything.
    ("builtins", "getattr"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    # Transformer Engine's extra states beside the weights, and settings such as a timeout.
    ("_io", "BytesIO"),
    ("datetime", "timedelta"),
    ("datetime", "datetime"),
    ("datetime", "timezone"),
    ("enum", "Enum"),
    ("enum", "IntEnum"),
    ("enum", "Flag"),
    ("enum", "IntFlag"),
}
# Any class or function of what writes checkpoints: none of them is imported, and weights are never objects of these.
_INERT_PACKAGES = ("megatron", "mindspeed", "mindspeed_llm", "transformer_engine")
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
_PLAIN = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("__builtin__", "set"): set,
    ("torch", "Size"): tuple,
}
_NAMESPACES = {("argparse", "Namespace"), ("types", "SimpleNamespace")}
_DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Unpickler(pickle.Unpickler):
    """Knows the names above and no others."""

    def __init__(self, stream: io.BytesIO, file: MappedFile, offsets: Mapping[str, int]) -> None:
        super().__init__(stream)
        self._file, self._offsets = file, offsets
        # A pickle may set attributes of all that it can name, classes included: these are its own.
        self._namespace = type("Namespace", (argparse.Namespace,), {})
        self._inert = type("Inert", (Inert,), {})

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key in _PLAIN:
            return _PLAIN[key]
        if key in _DTYPES:
            return _DTYPES[key]
        if key in _NAMESPACES:
            return self._namespace
        if key in _INERT or module.split(".")[0] in _INERT_PACKAGES:
            return self._inert
        if key == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *given: self._tensor(*given)
        if key == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if key == ("torch._tensor", "_rebuild_from_type_v2"):
            # A tensor with attributes, as megatron-core marks its own; they are left out.
            return lambda rebuild, kind, given, attributes: rebuild(*given)
        raise UserError(
            f"{self._file.path} asks for {module}.{name}, which a checkpoint of weights has no use for: the file was "
            "not loaded. If it comes from a training run that you trust, save its weights without that object"
        )

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise ValueError(f"unknown persistent id {pid!r}")
        return self._offsets[f"data/{key}"], dtype

    def _tensor(
        self, storage: tuple[int, torch.dtype], start: int, shape: tuple, stride: tuple, *_: Any
    ) -> StoredTensor:
        offset, dtype = storage
        return StoredTensor(
            file=self._file,
            offset=offset + start * dtype.itemsize,
            dtype=dtype,
            shape=tuple(shape),
            stride=tuple(stride),
        )


def read_torch_file(path: Path) -> Any:
    """What a file of `torch.save` holds, with a `StoredTensor` for each tensor.

    Raises:
        UserError: it is missing, damaged, cut off, of the format of before torch 1.6, or asks for a class that it has
            no use for; says which.
    """
    try:
        file = MappedFile(path)
        with zipfile.ZipFile(path) as archive:
            entries = {name.split("/", 1)[-1]: info for name, info in archive.NameToInfo.items()}
            content = archive.read(entries["data.pkl"].filename)
            if "byteorder" in entries and archive.read(entries["byteorder"].filename) != b"little":
                raise UserError(f"{path}: was written on a big-endian machine, which is not supported; save it again")
        offsets = {name: entry_start(file, info) for name, info in entries.items()}
        return _Unpickler(io.BytesIO(content), file, offsets).load()
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} is missing; copy it to its place or convert again") from None
    except zipfile.BadZipFile as error:
        raise UserError(
            f"{path}: {path.stat().st_size} bytes that are no complete file of torch.save ({error}); it is cut off, "
            "damaged or older than torch 1.6: copy it again, or save it again with a current torch"
        ) from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise UserError(f"{path}: cannot be read as plain tensors ({type(error).__name__}: {error})") from error


def entry_start(file: MappedFile, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a zip entry start. The local header may have another length than the central one says."""
    lengths = file.head(info.header_offset + _LOCAL_HEADER - 4, 4)
    return (
        info.header_offset
        + _LOCAL_HEADER
        + int.from_bytes(lengths[:2], "little")
        + int.from_bytes(lengths[2:], "little")
    )
