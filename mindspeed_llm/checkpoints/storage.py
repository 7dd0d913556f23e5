"""Who acts on the checkpoint folder: one rank for all, or one per node where every node has a disk of its own."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from mindspeed_llm.checkpoints.files import DamagedCheckpoint
from mindspeed_llm.errors import UserError
from mindspeed_llm.platform import distributed

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint operation failed on some rank; every rank raises it, with the first cause."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The checkpoint folder as this rank sees it.

    `group` is a gloo group of all ranks for the operations' own messages; `shared` says whether all nodes see one
    folder; `is_leader` whether this rank makes, renames and removes directories. `nodes` has the node of every rank, by
    the number of its first rank.
    """

    group: dist.ProcessGroup
    shared: bool
    is_leader: bool
    nodes: tuple[int, ...]

    def together(self, what: str, action: Callable[[], Result]) -> Result:
        """Run `action` on every rank and go on only if all succeed, so that no rank waits for one that has failed.

        Raises:
            UserError: on all ranks alike, where the first failing rank has met one.
            CheckpointError: on all ranks alike, with the first failing rank's cause.
        """
        error, result = None, None
        try:
            result = action()
        except UserError as mistake:
            error = (True, str(mistake))
        except DamagedCheckpoint as damage:
            error = (False, str(damage))
        except Exception as failure:
            error = (False, f"{type(failure).__name__}: {failure}")
        failed = [(rank, *found) for rank, found in enumerate(self.gather(error)) if found is not None]
        if failed:
            rank, is_mistake, text = failed[0]
            if is_mistake:
                raise UserError(text)
            more = f" (and on {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise CheckpointError(f"{what} failed on rank {rank}: {text}{more}")
        return result  # type: ignore[return-value]

    def leaders_only(self, what: str, action: Callable[[], object]) -> None:
        """`together`, where only the leaders have something to do."""
        self.together(what, action if self.is_leader else lambda: None)

    def gather(self, value: object) -> list:
        """The values of all ranks, in rank order."""
        values: list = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values


def open_storage(folder: Path, group: dist.ProcessGroup | None = None) -> Storage:
    """Find out whether all nodes see the same `folder` (a collective): rank 0 makes a file and all look for it.

    Args:
        group: of all ranks, with gloo; None makes a further one, which a thread may use while training goes on.

    Raises:
        CheckpointError: the folder cannot be made or written.
    """
    group = group or distributed.new_host_group()
    names: list[str] = [uuid.uuid4().hex]
    dist.broadcast_object_list(names, src=0, group=group)
    probe = folder / f".shared_{names[0]}"
    first_of_node = distributed.local_rank() == 0
    everyone = Storage(group=group, shared=False, is_leader=first_of_node, nodes=_nodes(group))

    def make() -> None:
        if first_of_node:
            # A link whose target is missing is a folder to make, too.
            Path(os.path.realpath(folder)).mkdir(parents=True, exist_ok=True)
        if distributed.rank() == 0:
            probe.touch()

    everyone.together(f"making {folder}", make)
    shared = all(everyone.gather(probe.exists()))
    if distributed.rank() == 0:
        probe.unlink()
    return replace(everyone, shared=shared, is_leader=distributed.rank() == 0 if shared else first_of_node)


def open_storage_for_reading(folder: Path, group: dist.ProcessGroup) -> Storage:
    """As `open_storage` for a `folder` that may be missing or read-only (a collective): nothing is written. Where it
    looks different from different nodes, each node is taken to have a disk of its own.
    """
    first_of_node = distributed.local_rank() == 0
    everyone = Storage(group=group, shared=False, is_leader=first_of_node, nodes=_nodes(group))
    try:
        found = folder.stat()
        seen = (found.st_ino, found.st_ctime_ns)
    except OSError:
        seen = None
    shared = len(set(everyone.gather(seen))) == 1
    return replace(everyone, shared=shared, is_leader=distributed.rank() == 0 if shared else first_of_node)


def _nodes(group: dist.ProcessGroup) -> tuple[int, ...]:
    nodes: list[int] = [0] * distributed.world_size()
    dist.all_gather_object(nodes, distributed.rank() - distributed.local_rank(), group=group)
    return tuple(nodes)


def on_any_rank(condition: bool) -> bool:
    """Whether `condition` holds on some rank (a collective)."""
    conditions: list[bool] = [False] * distributed.world_size()
    dist.all_gather_object(conditions, condition, group=distributed.new_host_group())
    return any(conditions)
