"""Norm and clipping of gradients that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], shard_group: dist.ProcessGroup | None) -> torch.Tensor:
    """L2 norm of all gradients together, as an fp32 scalar; the same on every rank.

    Each rank adds up the squares of its shards; the sums meet in one all-reduce over the ranks that share one copy of
    the model. Gradients that every rank holds whole count once.
    """
    sharded: list[torch.Tensor] = []
    whole: list[torch.Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            sharded.append(gradient.to_local())
        else:
            whole.append(gradient)
    device = (sharded + whole)[0].device
    total = _sum_of_squares(sharded, device)
    if shard_group is not None:
        dist.all_reduce(total, group=shard_group)
    return (total + _sum_of_squares(whole, device)).sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: torch.Tensor | float) -> None:
    """Multiply every gradient by `factor` in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            local.mul_(factor)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """`min(1, max_norm / (norm + 1e-6))`, torch's own rule (`clip_grad_norm_`)."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _sum_of_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors if tensor.numel()]
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack(norms).square().sum()
