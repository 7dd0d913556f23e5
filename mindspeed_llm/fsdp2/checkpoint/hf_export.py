"""Write a sharded model as a Hugging Face directory: one gathered parameter, and one file, in memory at a time."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from mindspeed_llm.fsdp2.checkpoint.hf_names import conversion_groups, to_file_layout

_STAGING = ".hf_export"
_INDEX = "model.safetensors.index.json"


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


@torch.no_grad()
def export_model(
    model: PreTrainedModel,
    folder: Path,
    *,
    config: PretrainedConfig,
    dtype_of: Callable[[str], torch.dtype],
    shard_size: int,
    is_writer: bool,
    save_tokenizer: Callable[[Path], object] | None = None,
) -> None:
    """Gather every parameter in turn (a collective: all ranks must call this) and write the files on the writing rank.

    The directory gets safetensors files of at most `shard_size` bytes with an index when there are several,
    config.json, generation_config.json and the tokenizer. Everything is written into a staging folder first and moved
    over at the end, the index last; weight files of an earlier export are removed.

    Args:
        config: what to write as config.json (with the dtype of the export).
        dtype_of: dtype on disk for a parameter of the model, by its name in the model.
        shard_size: bytes.
    """
    state = model.state_dict()
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    names = [name for name in state if name not in tied]
    meta = {n: torch.empty(state[n].shape, dtype=_file_dtype(state[n], dtype_of(n)), device="meta") for n in names}
    groups = conversion_groups(model, names)
    sizes: dict[str, int] = {}
    for group in groups:
        for name, tensor in to_file_layout(model, {n: meta[n] for n in group}).items():
            sizes[name] = tensor.numel() * tensor.element_size()
    plan = plan_shards(sizes, shard_size)

    staging = folder / _STAGING
    if is_writer:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    writer = _ShardWriter(staging, plan) if is_writer else None
    try:
        for group in groups:
            full = {}
            for name in group:
                tensor = state[name]
                gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if writer:
                    full[name] = gathered.to(device="cpu", dtype=meta[name].dtype)
                del gathered
            if writer:
                writer.add(to_file_layout(model, full))
        if writer:
            writer.finish()
            _write_configs(model, copy.deepcopy(config), staging, dtype_of(names[0]), save_tokenizer)
            _publish(staging, folder)
    finally:
        if is_writer:
            shutil.rmtree(staging, ignore_errors=True)


class _ShardWriter:
    """Keeps tensors of the shard that is being filled; writes it as soon as it is complete."""

    def __init__(self, folder: Path, plan: ShardPlan) -> None:
        self._folder, self._plan = folder, plan
        self._file_of = {name: file for file, names in plan.files for name in names}
        self._missing = {file: len(names) for file, names in plan.files}
        self._held: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            file = self._file_of[name]
            # A clone: parts of one gathered tensor (experts) would otherwise keep the whole of it alive and shared.
            self._held.setdefault(file, {})[name] = tensor.clone(memory_format=torch.contiguous_format)
            self._missing[file] -= 1
            if self._missing[file] == 0:
                path = self._folder / file
                save_file(self._held.pop(file), path, metadata={"format": "pt"})
                path.chmod(0o666 & ~_umask())  # the library makes files that only their owner may read
                with path.open("rb") as handle:
                    os.fsync(handle.fileno())

    def finish(self) -> None:
        assert not self._held, f"tensors without a complete file: {list(self._held)}"
        if len(self._plan.files) > 1:
            index = {
                "metadata": {"total_size": self._plan.total_size},
                "weight_map": dict(sorted(self._file_of.items())),
            }
            (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _file_dtype(tensor: torch.Tensor, wanted: torch.dtype) -> torch.dtype:
    return wanted if tensor.is_floating_point() else tensor.dtype


def _write_configs(
    model: PreTrainedModel,
    config: PretrainedConfig,
    folder: Path,
    dtype: torch.dtype,
    save_tokenizer: Callable[[Path], object] | None,
) -> None:
    config.dtype = dtype
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard renames the class
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if save_tokenizer is not None:
        save_tokenizer(folder)


def _publish(staging: Path, folder: Path) -> None:
    for stale in [*folder.glob("model*.safetensors"), folder / _INDEX]:
        stale.unlink(missing_ok=True)
    entries = sorted(staging.iterdir(), key=lambda path: (path.name == _INDEX, path.name))
    for path in entries:
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
