"""Which ranks of a job on the Megatron backend share one copy of the model.

Those that wait for one another in a forward pass: tensor parallel ranks, pipeline stages, and ranks that exchange
tokens of experts. All other ranks are copies, which work on texts of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Copy:
    """The copy of the model that this rank has a part of."""

    number: int
    count: int
    """Copies that the job has."""
    ranks: tuple[int, ...]
    """Of the copy, ascending."""
    group: dist.ProcessGroup
    """Of `ranks`."""

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for its copy."""
        return dist.get_rank() == self.ranks[0]


def find_copy() -> Copy:
    """The copy of this rank (a collective); megatron-core's groups exist."""
    from megatron.core import parallel_state

    own = [
        dist.get_process_group_ranks(group)
        for group in (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_expert_tensor_and_model_parallel_group(),
        )
    ]
    of_ranks: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, own)
    copies = connected([group for groups in of_ranks for group in groups])
    # Every rank takes part in making every group.
    groups = [dist.new_group(list(ranks)) for ranks in copies]
    number = next(n for n, ranks in enumerate(copies) if dist.get_rank() in ranks)
    return Copy(number=number, count=len(copies), ranks=copies[number], group=groups[number])


def connected(groups: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """The ranks of groups that have ranks in common, put together; ascending, by their first ranks."""
    found: list[set[int]] = []
    for group in groups:
        touching = [ranks for ranks in found if not ranks.isdisjoint(group)]
        found = [ranks for ranks in found if ranks.isdisjoint(group)]
        found.append(set(group).union(*touching))
    return sorted(tuple(sorted(ranks)) for ranks in found)
