"""The router's linear layer by torch alone; megatron-core's asks for a matrix product of Transformer Engine by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Gating(torch.autograd.Function):
    """Keeps the input for the backward pass in its own dtype, not in the router's, which is often twice as wide."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.router_dtype, ctx.bias_dtype = dtype, None if bias is None else bias.dtype
        return torch.nn.functional.linear(tokens.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        (gradient,) = gradients
        tokens, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_tokens = (gradient @ weight.to(ctx.router_dtype)).to(tokens.dtype)
        of_weight = (rows.t() @ tokens.flatten(0, -2).to(ctx.router_dtype)).to(weight.dtype)
        of_bias = None if ctx.bias_dtype is None else rows.sum(0).to(ctx.bias_dtype)
        return of_tokens, of_weight, of_bias, None


def router_gating_linear(inp: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype) -> Tensor:
    """inp [..., H], weight [E, H], bias [E] or None -> logits [..., E] in `router_dtype`, computed in it."""
    return _Gating.apply(inp, weight, bias, router_dtype)
