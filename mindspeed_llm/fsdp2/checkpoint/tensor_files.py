"""Writing tensors to a checkpoint's directory and reading them back (collectives), with torch.distributed.checkpoint.

torch writes a piece that several ranks hold (the shard of a replica, a step count) only once, and describes all pieces
in one `.metadata`. Where every node has a disk of its own, a node would then miss pieces that its ranks read. There,
each node writes every piece that one of its ranks holds, and has a `.metadata` of its own that prefers its own files:

                     node 0                      node 1
    rank 0: A        rank 1: B       |  rank 2: A        rank 3: B        two replicas of two shards
    __0_0: A         __1_0:          |  __2_0:           __3_0: B         as torch would write it
    __0_0: A         __1_0: B        |  __2_0: A         __3_0: B         as it is written here
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from mindspeed_llm.checkpoints.dcp_reader import SafeFileSystemReader, TensorsOnlyPlanner, first_cause
from mindspeed_llm.checkpoints.files import METADATA
from mindspeed_llm.checkpoints.storage import CheckpointError, Storage
from mindspeed_llm.platform import distributed


def write_tensors(tensors: Mapping[str, torch.Tensor], folder: Path, storage: Storage) -> None:
    """Write every rank's part of `tensors`, and `.metadata`, to `folder`; all is on the disk afterwards.

    Raises:
        CheckpointError: on all ranks, with the first cause.
    """
    nodes = [0] * distributed.world_size() if storage.shared else storage.nodes
    writer = _NodeWriter(folder, nodes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hints of the library about features that are not used here
            dcp.save(dict(tensors), storage_writer=writer, planner=_NodePlanner(nodes), process_group=storage.group)
    except CheckpointException as error:
        raise CheckpointError(f"writing to {folder} {first_cause(error)}") from None
    if storage.shared:
        return
    of_nodes = storage.gather(writer.metadata_of_nodes)[0]
    content = of_nodes[storage.nodes[distributed.rank()]]
    storage.leaders_only(f"writing {folder / METADATA}", lambda: write_bytes(folder / METADATA, content))


def read_tensors(tensors: dict[str, torch.Tensor], folder: Path, storage: Storage) -> None:
    """Fill `tensors` from `folder`.

    Raises:
        CheckpointError: on all ranks, with the first cause.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as in writing
            dcp.load(
                tensors,
                storage_reader=SafeFileSystemReader(folder),
                planner=TensorsOnlyPlanner(),
                process_group=storage.group,
            )
    except CheckpointException as error:
        raise CheckpointError(f"reading {folder} {first_cause(error)}{_hint(error)}") from None


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and push it to the disk."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


class _NodePlanner(DefaultSavePlanner):
    """torch's planner, which leaves out what another rank writes already: here, another rank of the same node."""

    def __init__(self, nodes: Sequence[int]) -> None:
        super().__init__()
        self._nodes = nodes

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        written: dict[int, set[MetadataIndex]] = {node: set() for node in self._nodes}
        for node, plan in zip(self._nodes, plans, strict=True):
            written[node].update(item.index for item in plan.items)
        for rank, (node, wanted) in enumerate(zip(self._nodes, all_plans, strict=True)):
            missing = [item for item in wanted.items if item.index not in written[node]]
            written[node].update(item.index for item in missing)
            plans[rank] = replace(plans[rank], items=[*plans[rank].items, *missing])
        return plans, metadata


class _NodeWriter(dcp.FileSystemWriter):
    """torch's writer; `metadata_of_nodes` (on rank 0, afterwards) is the content of each node's `.metadata`."""

    def __init__(self, folder: Path, nodes: Sequence[int]) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self._nodes = nodes
        self.metadata_of_nodes: dict[int, bytes] = {}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        if len(set(self._nodes)) == 1:
            return
        for node in set(self._nodes):
            own = {
                result.index: result.storage_data
                for its_node, part in zip(self._nodes, results, strict=True)
                if its_node == node
                for result in part
            }
            described = replace(metadata, storage_data={**(metadata.storage_data or {}), **own})
            self.metadata_of_nodes[node] = pickle.dumps(described)


def _hint(failure: CheckpointException) -> str:
    """Why a file may be missing in a checkpoint whose manifest is fulfilled."""
    if not any(isinstance(cause, FileNotFoundError) for cause, _ in failure.failures.values()):
        return ""
    return (
        " (nodes with disks of their own each hold what their own ranks wrote, and no more: to resume on other "
        "ranks, copy the checkpoint's files of all nodes into one folder)"
    )
