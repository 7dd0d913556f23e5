"""Reading `--ckpt-format torch_dist` on any ranks. megatron-core's reader unpickles; here nothing that files hold is
executed:

    .metadata        by an unpickler that knows the few classes which describe tensors
    common.pt        by the reader of `tasks.checkpoint`
    __0_0.distcp     tensors, and objects of plain values, by torch's weights-only unpickler
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from mindspeed_llm.checkpoints.dcp_reader import SafeFileSystemReader, first_cause, load_plain, read_metadata
from mindspeed_llm.checkpoints.files import METADATA, DamagedCheckpoint
from mindspeed_llm.checkpoints.storage import CheckpointError, Storage
from mindspeed_llm.core.shared_master import optimizer_parts
from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.torch_file import read_torch_file
from mindspeed_llm.training.checkpointing import optimizer_state, rng
from mindspeed_llm.training.checkpointing.content import OPTIMIZER, RNG
from mindspeed_llm.training.checkpointing.distributed_shards import fill_shards, room_for_parameters
from mindspeed_llm.training.checkpointing.layout import COMMON_FILE
from mindspeed_llm.training.checkpointing.model_part import Part
from mindspeed_llm.training.checkpointing.sharded_places import (
    FULLY_RESHARDABLE,
    Naming,
    master_names,
    model_tensors,
    optimizer_tensors,
    part_of,
    random_place,
)
from mindspeed_llm.training.setup import TrainingModel

_LAYERS_TOGETHER = re.compile(r"decoder\.layers\.(?!\d)")
# What the state of numpy's generator needs, in checkpoints that Megatron wrote.
_RECONSTRUCT = "numpy._core.multiarray" if np.__version__ >= "2" else "numpy.core.multiarray"
_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    (np.array(0).__reduce__()[0], f"{_RECONSTRUCT}._reconstruct"),
]


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
    folder: Path,
    content: Mapping[str, Any],
    model: TrainingModel,
    storage: Storage,
    *,
    optimizer: bool,
    random: bool,
    part: Part = Part.ALL,
) -> Mapping[str, Any] | None:
    """Fill the model or a part of it, and with `optimizer` the optimizer's tensors, whose states are allocated (a
    collective). Returns this rank's random state with `random`, where there is one for it.

    Raises:
        UserError: on all ranks; the checkpoint is of another model.
        CheckpointError: on all ranks; it cannot be read, or asks for something to be executed.
    """
    entries = storage.together(f"loading {folder}", lambda: read_metadata(folder))
    naming = storage.together(f"loading {folder}", lambda: _naming(content, entries, folder, optimizer=optimizer))
    whole = model_tensors(model, naming)
    chunks = {name: part_of(tensors, part) for name, tensors in whole.items()}
    for tensors in chunks.values():
        # Empty objects, which Transformer Engine would fill.
        for name in [name for name, value in tensors.items() if isinstance(value, ShardedObject)]:
            del tensors[name]
    wanted: dict[str, Any] = dict(chunks)
    parts, wholes = [], []
    if optimizer:
        parts = optimizer_parts(model.optimizer)
        wholes = [room_for_parameters(part) if isinstance(part, DistributedOptimizer) else None for part in parts]
        # Only the tensors: the rest stands in common.pt.
        wanted[OPTIMIZER] = dict(enumerate(optimizer_tensors(model, whole, wholes, naming)))
    if random and random_place(None).unique_key in entries.state_dict_metadata:
        wanted[RNG] = random_place(None)
    tensors, plain, factories = load_preprocess(wanted)
    tensors, _ = extract_sharded_base(tensors)
    _take_other_names(tensors, entries)
    _check_entries(tensors, entries, folder, storage, part)
    restored = _read_tensors(tensors, folder, storage)

    def fill() -> Mapping[str, Any]:
        loaded = restored()
        merge(loaded, plain)
        apply_factory_merges(loaded, factories)
        # A stage without adapters may have nothing to load, and nothing to train.
        for name, module in zip(chunks, model.modules, strict=True):
            _copy_where_not_in_place(loaded.get(name, {}), dict(module.state_dict(keep_vars=True)))
        for index, part in enumerate(parts):
            state = loaded.get(OPTIMIZER, {}).get(index, {})
            if isinstance(part, DistributedOptimizer):
                whole = wholes[index] or {}
                fill_shards(part, dict(zip(whole, (state[number] for number in range(len(whole))), strict=True)))
            elif optimizer_state.parameters(part):
                optimizer_state.fill_plain(part, state, str(folder))
        return loaded

    states = storage.together(f"loading {folder}", fill).get(RNG)
    return rng.choose(states) if isinstance(states, list) else None


def _naming(content: Mapping[str, Any], entries: Metadata, folder: Path, *, optimizer: bool) -> Naming:
    """What a checkpoint says about its names, and what they show.

    Raises:
        UserError: the optimizer's state is in a form that only the same ranks of Megatron-LM can use.
    """
    found = content.get("content_metadata")
    options = found if isinstance(found, Mapping) else {}
    form = options.get("distrib_optim_sharding_type", FULLY_RESHARDABLE)
    if optimizer and form != FULLY_RESHARDABLE:
        raise UserError(
            f"--load {folder}: the state of the distributed optimizer is in the form {form}, expected "
            f"{FULLY_RESHARDABLE}; write it with Megatron-LM's --dist-ckpt-optim-fully-reshardable, or give "
            "--no-load-optim"
        )
    return Naming(
        layers_together=any(_LAYERS_TOGETHER.match(name) for name in entries.state_dict_metadata),
        shards_apart=options.get("singleton_local_shards") is True,
    )


def _take_other_names(tensors: Any, entries: Metadata) -> None:
    """Look for fp32 copies of parameters under the names of other optimizers, where those of this one are not there."""
    found = entries.state_dict_metadata
    for place in nested_values(tensors):
        if isinstance(place, ShardedTensor) and place.key not in found:
            place.key = next((name for name in master_names(place.key) if name in found), place.key)


def _check_entries(tensors: Any, entries: Metadata, folder: Path, storage: Storage, part: Part) -> None:
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
    for share in storage.gather(own):
        everyone.update(share)

    def check() -> None:
        found = {
            name: entry
            for name, entry in entries.state_dict_metadata.items()
            if not isinstance(entry, BytesStorageMetadata)
        }
        missing = sorted(everyone.keys() - found.keys())
        left_over = sorted(
            name
            for name in found.keys() - everyone.keys()
            if not name.startswith(f"{OPTIMIZER}.") and part.name_of(name) is not None
        )
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
