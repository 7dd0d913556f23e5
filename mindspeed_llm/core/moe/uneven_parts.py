"""Gathering and scattering rows of which each rank has another number, where the backend takes equal parts only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_llm.platform.distributed import exchanges_uneven_parts

Collective = Callable[..., Tensor]


def with_uneven_gather(original: Collective) -> Collective:
    """A wrapper of megatron-core's `_gather_along_first_dim`."""

    def gather(
        rows: Tensor, group: dist.ProcessGroup, output_split_sizes: Sequence[int] | None = None, *arguments: bool
    ) -> Tensor:
        sizes = output_split_sizes
        if not _is_uneven(sizes, group):
            return original(rows, group, sizes, *arguments)
        most = max(sizes)
        parts = [rows.new_empty(most, *rows.shape[1:]) for _ in sizes]
        dist.all_gather(parts, _padded(rows, most), group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather


def with_uneven_reduce_scatter(original: Collective) -> Collective:
    """A wrapper of megatron-core's `_reduce_scatter_along_first_dim`."""

    def reduce_scatter(
        rows: Tensor, group: dist.ProcessGroup, input_split_sizes: Sequence[int] | None = None, *arguments: bool
    ) -> Tensor:
        sizes = input_split_sizes
        if not _is_uneven(sizes, group):
            return original(rows, group, sizes, *arguments)
        most = max(sizes)
        output = rows.new_empty(most, *rows.shape[1:])
        dist.reduce_scatter(output, [_padded(part, most) for part in rows.split(sizes)], group=group)
        return output[: sizes[group.rank()]]

    return reduce_scatter


def _is_uneven(sizes: Sequence[int] | None, group: dist.ProcessGroup) -> bool:
    return sizes is not None and group.size() > 1 and len(set(sizes)) > 1 and not exchanges_uneven_parts()


def _padded(rows: Tensor, count: int) -> Tensor:
    """The rows, and zeros behind them."""
    return torch.cat((rows, rows.new_zeros(count - len(rows), *rows.shape[1:]))) if len(rows) < count else rows
