"""Rank files of a Megatron checkpoint: laid out first, filled afterwards.

`torch.save` is asked to leave the bytes of tensors out (`skip_data`): it writes the pickle and leaves room. Where that
room is, our own reader of such files says. The checksums of the zip entries are put in when their bytes are known.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.tasks.checkpoint.fill import OpenFile
from mindspeed_llm.tasks.checkpoint.layout import DUALPIPEV, Topology
from mindspeed_llm.tasks.checkpoint.mg_reader import TRACKER
from mindspeed_llm.tasks.checkpoint.plan import TargetFile
from mindspeed_llm.tasks.checkpoint.staging import write_text
from mindspeed_llm.tasks.checkpoint.torch_file import read_torch_file
from mindspeed_llm.tasks.checkpoint.zip_checksums import checksum_places

ITERATION = 1
ITERATION_FOLDER = f"iter_{ITERATION:07d}"
_CHECKPOINT_VERSION = 3.0


def lay_out(folder: Path, file: TargetFile, arguments: Mapping[str, Any], chunks: list[str]) -> OpenFile:
    """Write a rank file without the bytes of its tensors.

    Args:
        arguments: what it carries as `args`.
        chunks: the keys of its models, those without any tensor too.
    """
    path = folder / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": _CHECKPOINT_VERSION,
        "iteration": ITERATION,
    } | {chunk: {} for chunk in chunks}
    for target in file.targets:
        chunk, key = _split(target.key)
        # Memory that is never touched takes address space only.
        state[chunk][key] = torch.empty(target.shape, dtype=target.dtype)
    # Into a stream: by itself, torch has no words for a disk that is full.
    with path.open("wb") as stream, torch.serialization.skip_data():
        torch.save(state, stream)
    written = read_torch_file(path)
    offsets = {target.key: written[chunk][key].offset for target in file.targets for chunk, key in [_split(target.key)]}
    places = checksum_places(path)
    checksums = {key: places[offset] for key, offset in offsets.items() if offset in places}
    return OpenFile(path=path, targets=file.targets, offsets=offsets, checksums=checksums)


def _split(name: str) -> tuple[str, str]:
    chunk, key = name.split("/", 1)
    return chunk, key


def write_tracker(folder: Path) -> None:
    """Write the file that says which iteration is the latest."""
    write_text(folder / TRACKER, str(ITERATION))


def topology_arguments(topology: Topology, num_layers: int, padded_vocab_size: int) -> dict[str, Any]:
    """What a checkpoint says about how it is split, by the names of Megatron's arguments.

    `num_layers` counts the layers that hold weights; as in training, the argument counts noop layers too.
    """
    virtual = topology.layers_per_virtual_stage
    total = num_layers + len(topology.noop_layers)
    return {
        "num_layers": total,
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.tp if topology.etp is None else topology.etp,
        "num_layers_per_virtual_pipeline_stage": virtual,
        "virtual_pipeline_model_parallel_size": 2
        if topology.schedules_method == DUALPIPEV
        else total // topology.pp // virtual
        if virtual
        else None,
        "num_layer_list": ",".join(map(str, topology.num_layer_list)) if topology.num_layer_list else None,
        "noop_layers": set(topology.noop_layers) or None,
        "schedules_method": topology.schedules_method,
        "mtp_num_layers": topology.mtp_num_layers or None,
        "moe_tp_extend_ep": topology.moe_tp_extend_ep,
        "moe_grouped_gemm": topology.moe_grouped_gemm,
        "mla_mm_split": topology.mla_mm_split,
        "transformer_impl": topology.transformer_impl,
        "padded_vocab_size": padded_vocab_size,
    }
