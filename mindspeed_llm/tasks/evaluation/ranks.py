"""Objects that ranks tell each other, in host memory. Ranks work on their own for hours: they are waited for without
the timeout of collectives.
"""

from __future__ import annotations

import uuid
from typing import Any, TypeVar

T = TypeVar("T")


class Ranks:
    """All ranks of the job. Building it and each call but `follow` is a collective."""

    def __init__(self) -> None:
        from mindspeed_llm.platform import distributed

        self.size = distributed.world_size() if _is_started() else 1
        self.rank = distributed.rank() if self.size > 1 else 0
        self.is_first_of_node = self.size == 1 or distributed.local_rank() == 0
        self._group: Any = distributed.new_host_group() if self.size > 1 else None
        # Those of another job in the same process group are not taken for ours.
        self._name = self.gather_everywhere(uuid.uuid4().hex)[0]

    def gather(self, value: T) -> list[T]:
        """The value of each rank on rank 0; an empty list on the others."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        from mindspeed_llm.platform import distributed

        distributed.wait_for_all()
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, found, dst=0, group=self._group)
        return found or []

    def follow(self, name: str, *, leads: bool) -> None:
        """Wait until the rank that leads has come here; it does not wait itself.

        Args:
            name: the same on the ranks that belong together, and another one each time.
        """
        if self.size == 1:
            return
        from mindspeed_llm.platform import distributed

        name = f"{self._name}/{name}"
        if leads:
            distributed.tell(name)
        else:
            distributed.wait_until_told(name)

    def gather_everywhere(self, value: T) -> list[T]:
        """The value of each rank, on every rank."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        from mindspeed_llm.platform import distributed

        distributed.wait_for_all()
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found


def _is_started() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
