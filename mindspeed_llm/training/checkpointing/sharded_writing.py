"""Writing `--ckpt-format torch_dist`: megatron-core's distributed checkpoints, which other ranks can load.

Every tensor has its place in the whole model, so that it can be cut in another way. megatron-core's own writer forks a
process for each file; here the ranks write themselves, in the same format:

    common.pt                       what is alike on all ranks: arguments, counters, schedule
    metadata.json                   says that it is such a checkpoint
    .metadata, __0_0.distcp ...     tensors, and the random states of ranks (torch.distributed.checkpoint)
"""

from __future__ import annotations

import os
import warnings
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mindspeed_llm.checkpoints.dcp_reader import first_cause
from mindspeed_llm.checkpoints.files import METADATA, describe_file
from mindspeed_llm.checkpoints.storage import CheckpointError, Storage
from mindspeed_llm.core.shared_master import optimizer_parts
from mindspeed_llm.errors import UserError
from mindspeed_llm.platform import distributed
from mindspeed_llm.training.checkpointing import optimizer_state, rng
from mindspeed_llm.training.checkpointing.content import OPTIMIZER, RNG, SCHEDULER
from mindspeed_llm.training.checkpointing.distributed_shards import gather_parameters
from mindspeed_llm.training.checkpointing.layout import COMMON_FILE, SHARDED_CONFIG, TORCH_DIST
from mindspeed_llm.training.checkpointing.model_part import Part
from mindspeed_llm.training.checkpointing.sharded_places import (
    FULLY_RESHARDABLE,
    OURS,
    model_tensors,
    optimizer_tensors,
    part_of,
    random_place,
)
from mindspeed_llm.training.checkpointing.torch_saving import disk_error, save_file
from mindspeed_llm.training.setup import TrainingModel


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
    chunks = model_tensors(model)
    if args.lora_ckpt_filter:
        chunks = {name: part_of(tensors, Part.ADAPTERS) for name, tensors in chunks.items()}
    state: dict[str, Any] = {**common, **chunks, "content_metadata": OURS.options()}
    if not args.no_save_optim:
        parts = optimizer_parts(model.optimizer)
        wholes = [gather_parameters(part) if isinstance(part, DistributedOptimizer) else None for part in parts]
        states = optimizer_tensors(model, model_tensors(model), wholes)
        for index, part in enumerate(parts):
            if isinstance(part, DistributedOptimizer):
                tensors = {"param_state": states[index]} if states[index] else {}
                kind = {"param_state_sharding_type": FULLY_RESHARDABLE}
                states[index] = {**optimizer_state.plain_state(part), **kind, **tensors}
        state[OPTIMIZER] = states[0] if len(states) == 1 else dict(enumerate(states))
        state[SCHEDULER] = model.scheduler.state_dict()
    if not args.no_save_rng:
        state[RNG] = _random_states()
    tensors, plain = save_preprocess(state)
    plain["content_metadata"].pop("dp_cp_group", None)
    rank = distributed.rank()

    def write_plain() -> dict[str, dict[str, Any]]:
        if rank != 0:
            return {}
        save_config(CheckpointingConfig(TORCH_DIST), str(folder))
        _sync(folder / SHARDED_CONFIG)
        return {COMMON_FILE: save_file(plain, folder / COMMON_FILE)}

    written = storage.together(f"writing to {folder}", write_plain)
    _write_tensors(tensors, folder, storage)

    def describe() -> dict[str, dict[str, Any]]:
        names = [path.name for path in folder.glob(f"__{rank}_*.distcp")]
        if rank == 0:
            names += [SHARDED_CONFIG, METADATA]
        return written | {name: describe_file(folder / name) for name in names}

    return storage.together(f"reading back {folder}", describe)


class _Writer(dcp.FileSystemWriter):
    """torch's writer, with the disk's errors."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise disk_error(error) from None


def _write_tensors(tensors: Any, folder: Path, storage: Storage) -> None:
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(tensors, True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hints of the library about features that are not used here
            dcp.save(
                mcore_to_pyt_state_dict(by_key, False),
                storage_writer=_Writer(folder, single_file_per_rank=True, sync_files=True),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=storage.group,
            )
    except CheckpointException as error:
        raise CheckpointError(f"writing to {folder} {first_cause(error)}") from None


def _sync(path: Path) -> None:
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def _random_states() -> ShardedObject:
    """The states of the data-parallel ranks of this tensor and pipeline rank (a collective)."""
    group = parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)
    states: list[Any] = [None] * group.size()
    dist.all_gather_object(states, rng.own_state(), group=group)
    return random_place(states)
