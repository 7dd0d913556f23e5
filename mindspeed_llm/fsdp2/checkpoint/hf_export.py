"""Write a sharded model as a Hugging Face directory: one gathered parameter in memory at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from mindspeed_llm.fsdp2.checkpoint.adapter_names import without_adapters
from mindspeed_llm.fsdp2.checkpoint.hf_names import conversion_groups, to_file_layout
from mindspeed_llm.fsdp2.checkpoint.hf_writer import HfWriter


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """What an export consists of, known before any value is.

    groups: names in the model, in the groups that `to_file_layout` converts together. dtypes: the type on disk of each
    of them. files: shape and dtype (on meta) of what will be written, by its name on disk and in that order.
    config_dtype: the type that config.json names.
    """

    groups: list[list[str]]
    dtypes: dict[str, torch.dtype]
    files: dict[str, torch.Tensor]
    config_dtype: torch.dtype


def plan_export(
    model: PreTrainedModel, state: Mapping[str, torch.Tensor], dtype_of: Callable[[str], torch.dtype]
) -> ExportPlan:
    """Plan the export of `state`, the state dict of `model` (on any device, meta included).

    Args:
        dtype_of: dtype on disk for a parameter of the model, by its name in the model; what is no floating-point number
            keeps its own.
    """
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    dtypes = {
        name: dtype_of(name) if tensor.is_floating_point() else tensor.dtype
        for name, tensor in state.items()
        if name not in tied
    }
    groups = conversion_groups(model, list(dtypes))
    files: dict[str, torch.Tensor] = {}
    for group in groups:
        meta = {name: torch.empty(state[name].shape, dtype=dtypes[name], device="meta") for name in group}
        files |= to_file_layout(model, meta)
    return ExportPlan(groups=groups, dtypes=dtypes, files=files, config_dtype=dtype_of(next(iter(dtypes))))


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
    changes: Mapping[str, Callable[[], torch.Tensor]] | None = None,
) -> None:
    """Gather every parameter in turn (a collective: all ranks must call this) and write the files on the writing rank.

    The directory gets safetensors files of at most `shard_size` bytes with an index when there are several,
    config.json, generation_config.json and the tokenizer. Everything is written into a staging folder first and moved
    over at the end, config.json last; weight files of an earlier export, an adapter's too, are removed.

    Args:
        config: what to write as config.json (with the dtype of the export).
        dtype_of: dtype on disk for a parameter of the model, by its name in the model.
        shard_size: bytes.
        changes: what to add to parameters, by their names without adapters; each is a collective that gives a whole
            tensor. Adapters themselves are not written.
    """
    state = without_adapters(model.state_dict())
    export = plan_export(model, state, dtype_of)
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(HfWriter(folder, export.files, shard_size)) if is_writer else None
        for group in export.groups:
            full = {}
            for name in group:
                tensor = state[name]
                gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if changes and name in changes:
                    gathered = gathered + changes[name]()
                if writer:
                    full[name] = gathered.to(device="cpu", dtype=export.dtypes[name])
                del gathered
            if writer:
                writer.add(to_file_layout(model, full))
        if writer:
            writer.write_configs(
                model,
                config,
                generation_config=model.generation_config,
                dtype=export.config_dtype,
                save_tokenizer=save_tokenizer,
            )
            writer.publish()
