"""The tensors of a Hugging Face model directory, as views of its mapped files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.mapped_file import MappedFile
from mindspeed_llm.tasks.checkpoint.safetensors_file import DTYPES, HeaderEntry, read_header
from mindspeed_llm.tasks.checkpoint.torch_file import StoredTensor, read_torch_file
from mindspeed_llm.tasks.checkpoint.weight_index import indexed_files, read_index

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_LAYOUTS = (
    # (index, single file, any other name)
    (_INDEXES[0], "model.safetensors", "*.safetensors"),
    (_INDEXES[1], "pytorch_model.bin", "pytorch_model*.bin"),
)
# What a table has a row for each of: a wrong number would fill the memory before it is compared with the weights.
_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "num_nextn_predict_layers"),
    *("num_experts", "num_local_experts", "n_routed_experts"),
)
_MOST = 5000
_HEADER_LIMIT = 100 * 2**20


@dataclass(frozen=True, kw_only=True)
class StoredHf:
    """A tensor of a directory: its shape and dtype from the header, its values when asked for."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    view: Callable[[], torch.Tensor] = field(repr=False)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model directory; of a model with several parts, that of its language model.

    Raises:
        UserError: it is missing or no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing; expected the folder of a Hugging Face model, with its config.json"
        ) from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); expected a JSON object") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds a {type(config).__name__}; expected a JSON object")
    for part in (config, config.get("text_config")):
        for key in _COUNTS if isinstance(part, Mapping) else ():
            if isinstance(part.get(key), int) and part[key] > _MOST:
                raise UserError(f"{path}: {key} is {part[key]}; expected a number of at most {_MOST}")
    return config


def open_hf(
    folder: Path, prefixes: Mapping[str, str] | None = None, *, is_needed: Callable[[str], bool] = lambda name: True
) -> dict[str, StoredHf]:
    """All tensors of a model directory by name; reads headers only.

    Args:
        prefixes: start of a name -> what to replace it with, for models that are a part of a larger one.
        is_needed: whether a file may not lack a tensor that the index says it has. An index may name the output layer
            of a tied model, which is in no file.

    Raises:
        UserError: no weights, a file or a tensor that the index names is missing, a file that is cut off or damaged,
            one name in two files.
    """
    tensors: dict[str, StoredHf] = {}
    index, files = _layout(folder)
    for path in files:
        for found, tensor in open_weight_file(path).items():
            name = _renamed(found, prefixes or {})
            if name in tensors:
                raise UserError(
                    f"{folder}: tensor {name} is in two files, {tensors[name].file.name} and {path.name}; remove the "
                    "stale one"
                )
            tensors[name] = tensor
    if index is not None:
        _check_index(index, tensors, prefixes or {}, is_needed)
    return tensors


def _check_index(
    index: Path, tensors: Mapping[str, StoredHf], prefixes: Mapping[str, str], is_needed: Callable[[str], bool]
) -> None:
    for found, file in read_index(index).items():
        name = _renamed(found, prefixes)
        if (name not in tensors or tensors[name].file.name != Path(file).name) and is_needed(name):
            raise UserError(
                f"{index} says that tensor {found} is in {file}, which does not have it; index and files belong to "
                "different versions of the model: copy all of them again"
            )


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    for found, wanted in prefixes.items():
        if name.startswith(found):
            return wanted + name.removeprefix(found)
    return name


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model directory's weights.

    Raises:
        UserError: there are none, or one that the index names is missing.
    """
    return _layout(folder)[1]


def _layout(folder: Path) -> tuple[Path | None, list[Path]]:
    """The index, where there is one, and the files; safetensors before others, as transformers looks for them."""
    for index, single, _ in _LAYOUTS:
        if (folder / index).is_file():
            files = indexed_files(folder / index)
            if (folder / single).is_file() and folder / single not in files:
                raise UserError(
                    f"{folder} holds both {single} and {index}, which does not name it: two sets of weights, of which "
                    "transformers reads the single file. Remove the one that is not meant, the index with its files"
                )
            return folder / index, files
        if (folder / single).is_file():
            return None, [folder / single]
    # Under names that transformers does not look for.
    for _, _, pattern in _LAYOUTS:
        if found := sorted(folder.glob(pattern)):
            return None, found
    raise UserError(
        f"{folder} has no weights; expected model.safetensors or pytorch_model.bin, or one of their .index.json with "
        "the files that it names"
    )


def open_weight_file(path: Path) -> dict[str, StoredHf]:
    """The tensors of one weight file by the names in it; reads its header only.

    Raises:
        UserError: it is cut off or damaged.
    """
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    content = read_torch_file(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}; expected tensors by name")
    return {
        name: StoredHf(file=path, dtype=tensor.dtype, shape=tensor.shape, view=tensor.view)
        for name, tensor in content.items()
        if isinstance(tensor, StoredTensor)
    }


def _open_safetensors(path: Path) -> dict[str, StoredHf]:
    file = MappedFile(path)
    if not file.size:
        raise UserError(f"{path} is empty; copy it again")
    start = 8 + int.from_bytes(file.head(0, 8), "little")
    if file.size < 8 or start > min(file.size, _HEADER_LIMIT):
        raise UserError(f"{path}: {file.size} bytes are less than its header says; it is cut off, copy it again")
    try:
        entries = read_header(file.head(8, start - 8))
    except ValueError as error:
        raise UserError(f"{path}: its header is damaged ({error}); copy it again") from None
    end = start + max((entry.end for entry in entries.values()), default=0)
    if file.size < end:
        raise UserError(f"{path}: has {file.size} bytes, its header says {end}; it is cut off, copy it again")
    if file.size > end:
        raise UserError(
            f"{path}: has {file.size} bytes, its header says {end}; {file.size - end} bytes at its end belong to no "
            "tensor, copy it again"
        )
    return {name: _stored(file, start, entry) for name, entry in entries.items()}


def _stored(file: MappedFile, start: int, entry: HeaderEntry) -> StoredHf:
    if entry.dtype not in DTYPES:
        raise UserError(f"{file.path}: holds tensors of type {entry.dtype}; expected one of {', '.join(DTYPES)}")
    dtype, offset = DTYPES[entry.dtype], start + entry.start
    return StoredHf(
        file=file.path, dtype=dtype, shape=entry.shape, view=lambda: file.tensor(offset, dtype, entry.shape)
    )
