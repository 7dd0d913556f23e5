"""`--ckpt-format torch_dist`: megatron-core's distributed checkpoints, which other ranks can load.

Every tensor has its place in the whole model, so that it can be cut in another way. megatron-core's writer forks
processes for each file; here the ranks write themselves, in the same format. Its reader unpickles; here nothing is:

    .metadata        by an unpickler that knows the few classes which describe tensors
    common.pt        by the reader of `tasks.checkpoint`
    __0_0.distcp     tensors, and objects of plain values, by torch's weights-only unpickler
"""

from __future__ import annotations

import io
import math
import os
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base, extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from mindspeed_llm.checkpoints.dcp_reader import SafeFileSystemReader, first_cause, load_plain, read_metadata
from mindspeed_llm.checkpoints.files import METADATA, DamagedCheckpoint, describe_file
from mindspeed_llm.checkpoints.storage import CheckpointError, Storage
from mindspeed_llm.errors import UserError
from mindspeed_llm.platform import distributed
from mindspeed_llm.tasks.checkpoint.torch_file import read_torch_file
from mindspeed_llm.training.checkpointing import optimizer_state, rng
from mindspeed_llm.training.checkpointing.content import OPTIMIZER, RNG, SCHEDULER
from mindspeed_llm.training.checkpointing.distributed_shards import (
    KEYS,
    ByParameter,
    fill_shards,
    gather_parameters,
    room_for_parameters,
)
from mindspeed_llm.training.checkpointing.layout import COMMON_FILE, SHARDED_CONFIG
from mindspeed_llm.training.setup import TrainingModel

BACKEND = "torch_dist"
_FULLY_RESHARDABLE = "fully_reshardable"
_MODEL = "model"
# What the state of numpy's generator needs, in checkpoints that Megatron wrote.
_NUMPY = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    np.core.multiarray._reconstruct
    if np.lib.NumpyVersion(np.__version__) < "2.0.0"
    else np._core.multiarray._reconstruct,
]


# --- what lies where


def _metadata() -> dict[str, Any]:
    """Options of megatron-core's `sharded_state_dict`, and what the checkpoint says about them."""
    return {
        "distrib_optim_sharding_type": _FULLY_RESHARDABLE,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _model_tensors(model: TrainingModel) -> dict[str, dict[str, Any]]:
    """The chunks of this rank by their keys in the state; each entry says where its tensor lies in the whole model."""
    modules = model.modules
    return {
        _MODEL if len(modules) == 1 else f"{_MODEL}{index}": module.sharded_state_dict(metadata=_metadata())
        for index, module in enumerate(modules)
    }


def _optimizer_tensors(model: TrainingModel, chunks: Mapping[str, Any], wholes: list[ByParameter | None]) -> list[Any]:
    """For each optimizer its tensors, placed as its parameters are.

    Args:
        wholes: for each distributed optimizer its whole parameters and moments, where this rank has them.
    """
    found: list[Any] = []
    for part, whole in zip(optimizer_state.parts(model.optimizer), wholes, strict=True):
        if isinstance(part, DistributedOptimizer):
            found.append(_placed(whole, chunks) if whole is not None else {})
        elif optimizer_state.parameters(part):
            found.append(part.sharded_state_dict(chunks, metadata=_metadata()))
        else:
            found.append({})
    return found


def _placed(whole: ByParameter, chunks: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Whole parameters and moments under megatron-core's names: `optimizer.state.exp_avg.<name of the parameter>`."""
    tensors, _ = extract_sharded_tensors_and_factories(chunks)
    places = {id(place.data): place for place in nested_values(tensors)}
    return {
        number: {name: _like(places[id(parameter)], name, values[name]) for name in KEYS}
        for number, (parameter, values) in enumerate(whole.items())
    }


def _like(place: Any, name: str, values: torch.Tensor) -> Any:
    changes = {"key": f"optimizer.state.{name}.{place.key}", "data": values}
    if isinstance(place, ShardedTensor):
        changes["dtype"] = values.dtype
    return replace(place, **changes)


def _random_states() -> ShardedObject:
    """The states of the data-parallel ranks of this tensor and pipeline rank (a collective)."""
    group = parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)
    states: list[Any] = [None] * group.size()
    dist.all_gather_object(states, rng.own_state(), group=group)
    return _random_place(states)


def _random_place(states: Any) -> ShardedObject:
    here = rng.Place.here()
    return ShardedObject(RNG, states, (here.pp[1], here.tp[1]), (here.pp[0], here.tp[0]), replica_id=here.dp[0])


# --- writing


def write(
    folder: Path, args: Namespace, model: TrainingModel, common: Mapping[str, Any], storage: Storage
) -> dict[str, dict[str, Any]]:
    """Write this rank's part to `folder` (a collective); all is on the disk afterwards. Returns the files that this
    rank wrote, with size and hash.

    Raises:
        UserError: the nodes have disks of their own.
        CheckpointError: on all ranks, with the first cause.
    """
    if not storage.shared:
        raise UserError(
            f"--save {args.save}: --ckpt-format torch_dist needs a folder that all nodes see, but they have disks of "
            "their own; name another folder, or give --ckpt-format torch"
        )
    state: dict[str, Any] = {**common, **_model_tensors(model), "content_metadata": _metadata()}
    if not args.no_save_optim:
        parts = optimizer_state.parts(model.optimizer)
        wholes = [gather_parameters(part) if isinstance(part, DistributedOptimizer) else None for part in parts]
        states = _optimizer_tensors(model, _model_tensors(model), wholes)
        for index, part in enumerate(parts):
            if isinstance(part, DistributedOptimizer):
                tensors = {"param_state": states[index]} if states[index] else {}
                kind = {"param_state_sharding_type": _FULLY_RESHARDABLE}
                states[index] = {**optimizer_state.plain_state(part), **kind, **tensors}
        state[OPTIMIZER] = dict(enumerate(states)) if len(states) > 1 else states[0]
        state[SCHEDULER] = model.scheduler.state_dict()
    if not args.no_save_rng:
        state[RNG] = _random_states()
    tensors, plain = save_preprocess(state)
    plain["content_metadata"].pop("dp_cp_group", None)
    rank = distributed.rank()

    def write_plain() -> None:
        if rank != 0:
            return
        _save_durably(plain, folder / COMMON_FILE)
        save_config(CheckpointingConfig(BACKEND), str(folder))
        _sync(folder / SHARDED_CONFIG)

    storage.together(f"writing to {folder}", write_plain)
    _write_tensors(tensors, folder, storage)

    def describe() -> dict[str, dict[str, Any]]:
        names = [path.name for path in folder.glob(f"__{rank}_*.distcp")]
        if rank == 0:
            names += [COMMON_FILE, SHARDED_CONFIG, METADATA]
        return {name: describe_file(folder / name) for name in names}

    return storage.together(f"reading back {folder}", describe)


def _write_tensors(tensors: Any, folder: Path, storage: Storage) -> None:
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hints of the library about features that are not used here
            dcp.save(
                mcore_to_pyt_state_dict(by_key, False),
                storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=storage.group,
            )
    except CheckpointException as error:
        raise CheckpointError(f"writing to {folder} {first_cause(error)}") from None


def _save_durably(content: Any, path: Path) -> None:
    torch.save(content, path)
    _sync(path)


def _sync(path: Path) -> None:
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


# --- reading


def read_content(folder: Path) -> dict[str, Any]:
    """What `common.pt` holds, with a `StoredTensor` for each tensor; and, under the key of the random states, whether
    there are any.

    Raises:
        UserError: it cannot be read, or asks for a class; names it.
        DamagedCheckpoint: the same of `.metadata`.
    """
    content = read_torch_file(folder / COMMON_FILE)
    if not isinstance(content, dict):
        raise UserError(f"{folder / COMMON_FILE}: holds a {type(content).__name__}; expected the state of a run")
    if any(name.startswith(f"{RNG}/") for name in read_metadata(folder).state_dict_metadata):
        content[RNG] = True
    return content


def load(
    folder: Path, content: Mapping[str, Any], model: TrainingModel, storage: Storage, *, optimizer: bool, random: bool
) -> Mapping[str, Any] | None:
    """Fill the model, and with `optimizer` the optimizer's tensors, whose states are allocated (a collective). Returns
    this rank's random state with `random`, where there is one for it.

    Raises:
        UserError: on all ranks; the checkpoint is of another model.
        CheckpointError: on all ranks; it cannot be read, or asks for something to be executed.
    """
    chunks = _model_tensors(model)
    for tensors in chunks.values():
        # Empty objects, which Transformer Engine would fill.
        for name in [name for name, value in tensors.items() if isinstance(value, ShardedObject)]:
            del tensors[name]
    wanted: dict[str, Any] = dict(chunks)
    parts, wholes = optimizer_state.parts(model.optimizer), []
    if optimizer:
        wholes = [room_for_parameters(part) if isinstance(part, DistributedOptimizer) else None for part in parts]
        # Only the tensors: the rest stands in common.pt.
        wanted[OPTIMIZER] = dict(enumerate(_optimizer_tensors(model, chunks, wholes)))
    entries = storage.together(f"loading {folder}", lambda: read_metadata(folder))
    if random and _random_place(None).unique_key in entries.state_dict_metadata:
        wanted[RNG] = _random_place(None)
    tensors, plain, factories = load_preprocess(wanted)
    tensors, _ = extract_sharded_base(tensors)
    _check_entries(tensors, entries, folder, storage)
    restored = _read_tensors(tensors, folder, storage)

    def fill() -> Mapping[str, Any]:
        loaded = restored()
        merge(loaded, plain)
        apply_factory_merges(loaded, factories)
        for name, module in zip(chunks, model.modules, strict=True):
            _copy_where_not_in_place(loaded[name], dict(module.state_dict(keep_vars=True)))
        for index, part in enumerate(parts if optimizer else ()):
            state = loaded[OPTIMIZER].get(index, {})
            if isinstance(part, DistributedOptimizer):
                whole = wholes[index] or {}
                fill_shards(part, dict(zip(whole, (state[number] for number in range(len(whole))), strict=True)))
            elif optimizer_state.parameters(part):
                optimizer_state.fill_plain(part, state, str(folder))
        return loaded

    states = storage.together(f"loading {folder}", fill).get(RNG)
    return rng.choose(states) if isinstance(states, list) else None


def _check_entries(tensors: Any, entries: Metadata, folder: Path, storage: Storage) -> None:
    """Compare what all ranks want with what is there, before anything is read (a collective).

    Raises:
        UserError: a tensor is missing, left over, or has another shape.
        CheckpointError: the pieces of a tensor do not cover it.
    """
    own = {
        place.key: (tuple(place.global_shape), place.allow_shape_mismatch)
        for place in nested_values(tensors)
        if isinstance(place, ShardedTensor)
    }
    everyone: dict[str, Any] = {}
    for part in storage.gather(own):
        everyone.update(part)

    def check() -> None:
        found = {
            name: entry
            for name, entry in entries.state_dict_metadata.items()
            if not isinstance(entry, BytesStorageMetadata)
        }
        missing = sorted(everyone.keys() - found.keys())
        left_over = sorted(name for name in found.keys() - everyone.keys() if not name.startswith(f"{OPTIMIZER}."))
        if missing or left_over:
            parts = [f"{len(missing)} tensors are not in it ({', '.join(missing[:3])})"] if missing else []
            parts += (
                [f"{len(left_over)} of its tensors have no place ({', '.join(left_over[:3])})"] if left_over else []
            )
            raise UserError(
                f"--load {folder}: belongs to another model or optimizer: {'; '.join(parts)}; set the flags as they "
                "were, or give --no-load-optim where only the optimizer is another one"
            )
        for name, (shape, may_differ) in everyone.items():
            size = tuple(found[name].size)
            # Padding of the vocabulary depends on the ranks.
            if size[may_differ:] != shape[may_differ:] or len(size) != len(shape):
                raise UserError(
                    f"--load {folder}: belongs to another model: {name} has shape {list(size)} instead of "
                    f"{list(shape)}; set the flags as they were"
                )
            if sum(math.prod(chunk.sizes) for chunk in found[name].chunks) != math.prod(size):
                raise DamagedCheckpoint(f"{folder / METADATA}: the pieces of {name} do not cover it")

    storage.together(f"loading {folder}", check)


class _Planner(MCoreLoadPlanner):
    """megatron-core's planner, which would unpickle objects; this one takes plain values only."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(flatten_state_dict=False, **options)
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        with torch.serialization.safe_globals(_NUMPY):
            content = load_plain(self._folder / name, value)
        self.state_dict[name] = self.original_state_dict[name] = content


def _read_tensors(tensors: Any, folder: Path, storage: Storage) -> Callable[[], dict[str, Any]]:
    """Read what `tensors` places, into them (a collective); the result gives it in the same structure.

    Raises:
        CheckpointError: on all ranks, with the first cause.
    """
    by_key, structure, names = _replace_state_dict_keys_with_sharded_keys(tensors)
    places = [place for place in nested_values(tensors) if isinstance(place, ShardedTensor)]
    state = mcore_to_pyt_state_dict(by_key, True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as in writing
            dcp.load(
                state,
                storage_reader=SafeFileSystemReader(folder),
                planner=_Planner(
                    folder,
                    shapes_validation_sharded_tensors=[place for place in places if not place.allow_shape_mismatch],
                    allow_shape_mismatch_sharded_tensors={p.key: p for p in places if p.allow_shape_mismatch},
                ),
                process_group=storage.group,
            )
    except CheckpointException as error:
        raise CheckpointError(f"reading {folder} {first_cause(error)}") from None

    def restored() -> dict[str, Any]:
        flat = {key: _unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        result = _replace_sharded_keys_with_state_dict_keys(flat, structure, names)
        _restore_dict_types(result, tensors)
        return result

    return restored


def _copy_where_not_in_place(loaded: Mapping[str, Any], own: Mapping[str, torch.Tensor | None]) -> None:
    """Most tensors were read right into the model; those that are stored in another form were not."""
    with torch.no_grad():
        for name, value in loaded.items():
            target = own[name]
            assert target is not None, f"{name} is no tensor"
            if value.data_ptr() != target.data_ptr():
                target.copy_(value)
