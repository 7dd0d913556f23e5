"""A Hugging Face model directory, written tensor by tensor: nothing is held in memory but what is being written.

Sizes are known before the first value, so the header of a safetensors file

    8 bytes: length of the header | header: JSON, name -> dtype, shape, place of the bytes | bytes of all tensors

is written first, and each tensor goes to its place when it comes.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from mindspeed_llm.fsdp2.checkpoint.weight_files import DTYPE_NAMES

_STAGING = ".hf_export"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
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


class HfWriter:
    """Writes into a staging folder inside `folder`; `publish` moves everything over. A context manager: leaving it
    removes what was not published.

        with HfWriter(folder, tensors, shard_size) as writer:
            writer.add({...})  # until every tensor has come, in any order
            writer.write_configs(...)
            writer.publish()
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, torch.Tensor],
        shard_size: int,
        *,
        on_file: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """
        Args:
            tensors: shape and dtype of all that will come (on meta), in the order in which files are filled.
            shard_size: bytes per file.
            on_file: called with (file name, number of files finished, number of files) when a file is complete.
        """
        self._folder, self._staging = folder, folder / _STAGING
        self._tensors = tensors
        self.plan = plan_shards({name: tensor.nbytes for name, tensor in tensors.items()}, shard_size)
        self._file_of = {name: file for file, names in self.plan.files for name in names}
        self._missing = {file: len(names) for file, names in self.plan.files}
        self._place: dict[str, int] = {}
        self._open: dict[str, BinaryIO] = {}
        self._finished = 0
        self._on_file = on_file

    def __enter__(self) -> HfWriter:
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._open.values():
            stream.close()
        shutil.rmtree(self._staging, ignore_errors=True)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write these tensors (in host memory) to their places."""
        for name, tensor in tensors.items():
            planned = self._tensors[name]
            assert tensor.shape == planned.shape and tensor.dtype == planned.dtype, name
            file = self._file_of[name]
            stream = self._open.get(file) or self._start(file)
            stream.seek(self._place[name])
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
            self._missing[file] -= 1
            if self._missing[file] == 0:
                self._finish(self._open.pop(file), file)

    def write_configs(
        self,
        model: PreTrainedModel,
        config: PretrainedConfig,
        *,
        generation_config: GenerationConfig | None,
        dtype: torch.dtype,
        save_tokenizer: Callable[[Path], object] | None,
    ) -> None:
        """Write config.json (a copy of `config` that names `dtype` and the class of `model`) and what goes with it."""
        config = copy.deepcopy(config)
        config.dtype = dtype
        config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard renames the class
        config.save_pretrained(self._staging)
        if generation_config is not None:
            generation_config.save_pretrained(self._staging)
        if save_tokenizer is not None:
            save_tokenizer(self._staging)

    def publish(self) -> None:
        """Move everything to the folder; weight files of an earlier export are removed.

        Several files cannot be exchanged in one step. config.json, without which no loader takes a directory for a
        model, goes first and comes back last, so that a kill in between never leaves a mixture of two exports that
        loads.
        """
        waiting = [file for file, count in self._missing.items() if count]
        assert not waiting, f"files that are not complete: {waiting}"
        if len(self.plan.files) > 1:
            index = {
                "metadata": {"total_size": self.plan.total_size},
                "weight_map": dict(sorted(self._file_of.items())),
            }
            (self._staging / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for stale in [self._folder / _CONFIG, self._folder / _INDEX, *self._folder.glob("model*.safetensors")]:
            stale.unlink(missing_ok=True)
        for path in sorted(self._staging.iterdir(), key=lambda path: (path.name == _CONFIG, path.name)):
            target = self._folder / path.name
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(path, target)

    def _start(self, file: str) -> BinaryIO:
        names = dict(self.plan.files)[file]
        # Wide types first, so that every tensor lies at a multiple of its own width.
        names = sorted(names, key=lambda name: -self._tensors[name].element_size())
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets, end = {}, 0
        for name in names:
            tensor = self._tensors[name]
            offsets[name], end = end, end + tensor.nbytes
            header[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offsets[name], end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        stream = (self._staging / file).open("wb")
        self._open[file] = stream
        stream.write(len(text).to_bytes(8, "little") + text)
        self._place |= {name: stream.tell() + offset for name, offset in offsets.items()}
        return stream

    def _finish(self, stream: BinaryIO, file: str) -> None:
        with stream:
            stream.flush()
            os.fsync(stream.fileno())
        self._finished += 1
        if self._on_file is not None:
            self._on_file(file, self._finished, len(self.plan.files))


def let_generation_stop(config: GenerationConfig | None, eos_token_id: int) -> None:
    """A chat template may end replies with a token of its own; generation must stop there too."""
    if config is None:
        return
    known = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if eos_token_id not in known:
        config.eos_token_id = [eos_token_id, *(token for token in known if token is not None)]
