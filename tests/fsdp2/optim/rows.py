"""Rows of the optimizer tests that run on the rank pool."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mindspeed_llm.fsdp2.optim.clip import clip_factor, gradient_norm, scale_gradients
from mindspeed_llm.platform import distributed


def clip(*, gradients: list[torch.Tensor], whole: list[int], max_norm: float) -> dict[str, Any]:
    """Norm and clipped gradients (gathered) where all but `whole` are sharded over their first dimension."""
    mesh = distributed.device_mesh((dist.get_world_size(),), ("fsdp",))
    parameters = []
    for i, gradient in enumerate(gradients):
        value = gradient if i in whole else distribute_tensor(gradient, mesh, [Shard(0)])
        parameter = nn.Parameter(torch.zeros_like(value))
        parameter.grad = value.clone()
        parameters.append(parameter)
    parameters.append(nn.Parameter(torch.zeros(3)))  # one without a gradient
    norm = gradient_norm(parameters, mesh.get_group("fsdp") if dist.get_world_size() > 1 else None)
    scale_gradients(parameters, clip_factor(norm, max_norm))
    clipped = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters[:-1]]
    return {"norm": norm, "clipped": clipped}
