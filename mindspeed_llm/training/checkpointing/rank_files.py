"""`--ckpt-format torch`: upstream's layout, a file for each tensor, pipeline and expert rank.

    iter_0000010/mp_rank_01_000/model_optim_rng.pt     weights, optimizer, schedule, random numbers, counters
    iter_0000010/mp_rank_01_000/distrib_optim.pt       parameters and moments of the distributed optimizer

Several ranks share a file: those that differ in their data-parallel rank only. The first of them writes it, on each
node where nodes have disks of their own. Files are read as data (`tasks.checkpoint.torch_file`), and tensors are copied
from the mapped file.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

from mindspeed_llm.checkpoints.files import DamagedCheckpoint
from mindspeed_llm.checkpoints.storage import Storage
from mindspeed_llm.core.shared_master import optimizer_parts
from mindspeed_llm.errors import UserError
from mindspeed_llm.platform import distributed
from mindspeed_llm.tasks.checkpoint.layout import Rank
from mindspeed_llm.tasks.checkpoint.torch_file import StoredTensor, read_torch_file
from mindspeed_llm.tasks.models.hf_weights import topology_of
from mindspeed_llm.training.checkpointing import optimizer_state, rng
from mindspeed_llm.training.checkpointing.content import OPTIMIZER, OURS, RNG, SCHEDULER, Wanted, ours
from mindspeed_llm.training.checkpointing.distributed_shards import (
    buffer_layout,
    check_buffers,
    gather_buffers,
    scatter_buffers,
)
from mindspeed_llm.training.checkpointing.layout import OPTIMIZER_FILE, RANK_FILE
from mindspeed_llm.training.checkpointing.model_part import Part
from mindspeed_llm.training.checkpointing.torch_saving import save_file
from mindspeed_llm.training.setup import TrainingModel

_EXTRA_STATE = "._extra_state"
_LAYOUTS = "buffer_layouts"


def own_folder(args: Namespace) -> str:
    """The name of the folder that holds this rank's files."""
    rank = Rank(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
    )
    return rank.folder(topology_of(args))


def chunk_name(index: int, count: int) -> str:
    """The key of a model: there are several where the pipeline has virtual stages."""
    return "model" if count == 1 else f"model{index}"


# --- writing


def write(
    folder: Path, args: Namespace, model: TrainingModel, common: Mapping[str, Any], storage: Storage
) -> dict[str, dict[str, Any]]:
    """Write this rank's files to `folder` (a collective); all is on the disk afterwards. Returns those it wrote, with
    size and hash.

    Raises:
        CheckpointError: on all ranks, with the first cause.
    """
    name = own_folder(args)
    content = {**common, **_models(model, adapters_alone=args.lora_ckpt_filter)}
    if not args.no_save_optim:
        parts = optimizer_parts(model.optimizer)
        states = [optimizer_state.plain_state(part) for part in parts]
        layouts = [buffer_layout(part) if isinstance(part, DistributedOptimizer) else None for part in parts]
        content[OURS] = {**content[OURS], _LAYOUTS: layouts}
        content[OPTIMIZER] = states[0] if len(states) == 1 else states
        content[SCHEDULER] = model.scheduler.state_dict()
    if not args.no_save_rng:
        content[RNG] = _random_states()
    shards = None if args.no_save_optim else _gather(model)

    def save() -> dict[str, dict[str, Any]]:
        written = {}
        (folder / name).mkdir(exist_ok=True)
        if _is_writer(names, storage, on_each_node=True):
            written[f"{name}/{RANK_FILE}"] = save_file(content, folder / name / RANK_FILE)
        if shards is not None:
            assert _is_writer(names, storage, on_each_node=False), "another rank writes to this folder"
            written[f"{name}/{OPTIMIZER_FILE}"] = save_file(shards, folder / name / OPTIMIZER_FILE)
        return written

    names = storage.gather(name)
    return storage.together(f"writing to {folder}", save)


def _models(model: TrainingModel, *, adapters_alone: bool) -> dict[str, dict[str, Any]]:
    modules = model.modules
    states = {chunk_name(index, len(modules)): dict(module.state_dict()) for index, module in enumerate(modules)}
    if not adapters_alone:
        return states
    named = Part.ADAPTERS.name_of
    return {name: {key: value for key, value in state.items() if named(key)} for name, state in states.items()}


def _random_states() -> list[dict[str, Any]]:
    """The states of the ranks that share a file, in data-parallel order (a collective)."""
    group = parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)
    states: list[Any] = [None] * group.size()
    own = rng.own_state()
    dist.all_gather_object(states, own, group=group)
    return [state for state in states if state["place"]["ep"] == own["place"]["ep"]]


def _gather(model: TrainingModel) -> Any:
    """What `distrib_optim.pt` holds, where this rank has a part of it (a collective)."""
    parts = optimizer_parts(model.optimizer)
    found = [gather_buffers(part) if isinstance(part, DistributedOptimizer) else None for part in parts]
    if all(state is None for state in found):
        return None
    return found[0] if len(found) == 1 else found


def _is_writer(names: Sequence[str], storage: Storage, *, on_each_node: bool) -> bool:
    """Whether this rank is the first of those that share its file."""
    rank = distributed.rank()
    own = (names[rank], storage.nodes[rank] if on_each_node and not storage.shared else 0)
    everyone = [
        (name, node if on_each_node and not storage.shared else 0)
        for name, node in zip(names, storage.nodes, strict=True)
    ]
    return everyone.index(own) == rank


# --- reading


def read_content(folder: Path, args: Namespace) -> dict[str, Any]:
    """What this rank's file holds, with a `StoredTensor` for each tensor.

    Raises:
        UserError: there is none, or it is of no use; names it.
    """
    path = folder / own_folder(args) / RANK_FILE
    if not path.is_file():
        there = sorted(found.parent.name for found in folder.glob(f"mp_rank_*/{RANK_FILE}"))
        shown = ", ".join(there[:4]) + (f" and {len(there) - 4} more" if len(there) > 4 else "")
        raise UserError(
            f"--load {folder}: {path.parent.name}/{RANK_FILE}, the file of rank {distributed.rank()}, is missing; "
            f"there are {shown}: the checkpoint was written by other ranks"
        )
    content = read_torch_file(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}; expected the state of a Megatron model")
    return content


def load_model(content: Mapping[str, Any], model: TrainingModel, path: Path, part: Part = Part.ALL) -> None:
    """Copy the weights, or a part of them.

    Raises:
        UserError: names or shapes differ from those of the model; nothing was copied then.
    """
    pairs = []
    modules = model.modules
    for index, module in enumerate(modules):
        name = chunk_name(index, len(modules))
        stored = content.get(name)
        if not isinstance(stored, Mapping):
            found = [key for key in content if str(key).startswith("model")]
            raise UserError(f"{path}: has no {name}, but {', '.join(found) or 'no model at all'}")
        pairs += _pairs(stored, module, f"{path} ({name})", part)
    with torch.no_grad():
        for target, tensor in pairs:
            target.copy_(tensor.view())


def _pairs(
    stored: Mapping[str, Any], module: nn.Module, where: str, part: Part
) -> list[tuple[torch.Tensor, StoredTensor]]:
    state = module.state_dict(keep_vars=True)
    own = {part.name_of(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    found = {
        part.name_of(name): value
        for name, value in stored.items()
        if isinstance(value, StoredTensor) and not name.endswith(_EXTRA_STATE)
    }
    own.pop(None, None)
    found.pop(None, None)
    missing, left_over = sorted(own.keys() - found.keys()), sorted(found.keys() - own.keys())
    if missing or left_over:
        parts = [f"{len(missing)} tensors are not in it ({', '.join(missing[:3])})"] if missing else []
        parts += [f"{len(left_over)} of its tensors have no place ({', '.join(left_over[:3])})"] if left_over else []
        raise UserError(f"{where}: belongs to another model: {'; '.join(parts)}; set the flags as they were")
    for name, value in own.items():
        if found[name].shape != tuple(value.shape):
            raise UserError(
                f"{where}: belongs to another model: {name} has shape {list(found[name].shape)} instead of "
                f"{list(value.shape)}; set the flags as they were"
            )
    return [(value, found[name]) for name, value in own.items()]


def load_optimizer(
    content: Mapping[str, Any], folder: Path, args: Namespace, model: TrainingModel, storage: Storage
) -> None:
    """Fill the optimizer, whose states are allocated (a collective).

    Raises:
        UserError, CheckpointError: on all ranks, with the first cause.
    """
    parts = optimizer_parts(model.optimizer)
    path = folder / own_folder(args)

    def read() -> list[Any]:
        saved = content[OPTIMIZER]
        states = saved if isinstance(saved, list) else [saved]
        if len(states) != len(parts):
            raise DamagedCheckpoint(f"{path / RANK_FILE}: has {len(states)} optimizers, expected {len(parts)}")
        for state, part in zip(states, parts, strict=True):
            if not isinstance(part, DistributedOptimizer):
                optimizer_state.fill_plain(part, state, str(path / RANK_FILE))
        layouts = ours(content).get(_LAYOUTS) or [None] * len(parts)
        return _read_buffers(parts, layouts, path / OPTIMIZER_FILE)

    buffers = storage.together(f"loading {folder}", read)
    for part, saved in zip(parts, buffers, strict=True):
        if isinstance(part, DistributedOptimizer):
            scatter_buffers(part, saved)


def _read_buffers(parts: Sequence[Any], layouts: Sequence[Any], path: Path) -> list[Any]:
    """For each optimizer its part of `distrib_optim.pt`, where this rank is the one to hand it out."""
    first = [isinstance(part, DistributedOptimizer) and part.data_parallel_group.rank() == 0 for part in parts]
    if not any(first):
        return [None] * len(parts)
    if not path.is_file():
        raise DamagedCheckpoint(f"{path} is missing: the state of the distributed optimizer")
    saved = read_torch_file(path)
    states = saved if isinstance(saved, list) else [saved]
    if len(states) != len(parts):
        raise DamagedCheckpoint(f"{path}: has {len(states)} optimizers, expected {len(parts)}")
    return [
        check_buffers(part, state, layout, str(path)) if is_first else None
        for part, state, layout, is_first in zip(parts, states, layouts, first, strict=True)
    ]


def random_state(content: Mapping[str, Any], want: Wanted) -> Mapping[str, Any] | None:
    """The state of random numbers for this rank; None where none fits or none is wanted."""
    states = content.get(RNG)
    if not want.rng:
        return None
    return rng.choose(states) if isinstance(states, list | tuple) else rng.choose([states]) if states else None
