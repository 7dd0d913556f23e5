"""A Hugging Face model directory, written tensor by tensor: nothing is held in memory but what is being written.

Sizes are known before the first value, so the header of a safetensors file is written first, and each tensor goes to
its place when it comes.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from mindspeed_llm.fsdp2.checkpoint.publish import CONFIG, publish
from mindspeed_llm.tasks.checkpoint.safetensors_file import INDEX, header, index_text, plan_shards

_STAGING = ".hf_export"


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
        """Move everything to the folder, in the place of earlier exports; config.json comes last, see `publish`."""
        waiting = [file for file, count in self._missing.items() if count]
        assert not waiting, f"files that are not complete: {waiting}"
        if len(self.plan.files) > 1:
            (self._staging / INDEX).write_text(index_text(self.plan), encoding="utf-8")
        publish(self._staging, self._folder, last=CONFIG)

    def _start(self, file: str) -> BinaryIO:
        names = dict(self.plan.files)[file]
        start, places, _ = header({name: (self._tensors[name].dtype, self._tensors[name].shape) for name in names})
        stream = (self._staging / file).open("wb")
        self._open[file] = stream
        stream.write(start)
        self._place |= places
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
