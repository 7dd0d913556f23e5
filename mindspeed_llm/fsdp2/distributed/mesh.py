"""The device mesh of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mindspeed_llm.platform import distributed


@dataclass(frozen=True, kw_only=True)
class DataMesh:
    """Ranks that hold different samples: `replicas` groups (axis "dp"), each of which shards the model over "fsdp".

    `mesh` has one axis ("fsdp",) without replication, or two ("dp", "fsdp") for HSDP. Rank r of the world reads data
    shard r: every rank is a data rank.
    """

    mesh: DeviceMesh
    replicas: int
    shards: int

    @property
    def size(self) -> int:
        """Number of data ranks."""
        return self.replicas * self.shards

    @property
    def rank(self) -> int:
        """This rank's position among the data ranks."""
        return distributed.rank()

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that together hold one copy of the model."""
        return self.mesh.get_group("fsdp")


def build_mesh(*, world_size: int, fsdp_size: int) -> DataMesh:
    """Mesh of `world_size` ranks; neighbours shard one copy of the model, so that its traffic stays inside a node."""
    replicas = world_size // fsdp_size
    assert replicas * fsdp_size == world_size, "checked with the configuration"
    shape, names = ((fsdp_size,), ("fsdp",)) if replicas == 1 else ((replicas, fsdp_size), ("dp", "fsdp"))
    return DataMesh(mesh=distributed.device_mesh(shape, names), replicas=replicas, shards=fsdp_size)
