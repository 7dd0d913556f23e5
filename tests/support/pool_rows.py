"""Rows that the pool's own tests send to it."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def world_facts() -> dict[str, int]:
    """What a row sees: its rank, the size of its world, and the sum of all ranks' numbers plus one."""
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "world": dist.get_world_size(), "sum": int(total)}


def raise_on(rank: int) -> None:
    """Raise on one rank while the others wait for it in a collective."""
    if dist.get_rank() == rank:
        raise ValueError("this rank fails on purpose")
    dist.barrier()


def hang_on(rank: int) -> None:
    """Sleep on one rank for longer than the test's time-out."""
    if dist.get_rank() == rank:
        time.sleep(600)


def die_on(rank: int) -> None:
    """End the process of one rank without a word."""
    if dist.get_rank() == rank:
        os._exit(3)


def gathered(groups_before: int) -> list[float]:
    """The numbers 0 to 3, cut over the second axis of a mesh and put together again.

    Args:
        groups_before: groups that are made before those of the mesh.
    """
    for _ in range(groups_before):
        dist.new_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    cut = distribute_tensor(torch.arange(4.0), mesh["shards"], [Shard(0)])
    return cut.detach().full_tensor().tolist()
