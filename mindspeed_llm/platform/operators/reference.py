"""Plain torch implementations: used on cpu, and the authority that the fused ones are compared with.

Arguments and results are those of `dispatch`. Each also runs in float64, so that gradients can be checked numerically.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False) -> torch.Tensor:
    """See `dispatch.rms_norm`. Rounds where the two conventions round: Llama before the weight, Gemma after it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = x.to(wide)
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.to(wide))).to(x.dtype)
    return weight * normed.to(x.dtype)


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `dispatch.rotary`."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `dispatch.rotate`."""
    rotated_dims = cos.shape[-1]
    x, rest = x[..., :rotated_dims], x[..., rotated_dims:]
    first, second = x.chunk(2, dim=-1)
    y = x * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((y, rest), dim=-1) if rest.shape[-1] else y


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `dispatch.swiglu`."""
    return F.silu(gate) * up


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """See `dispatch.attention`. On cpu torch's kernel takes grouped heads with and without a mask."""
    mask, is_causal = explicit_mask(q, k, mask=mask, is_causal=is_causal)
    empty_rows = None
    if mask is not None:
        mask, empty_rows = open_empty_rows(mask)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=True
    )
    return out if empty_rows is None else out.masked_fill(empty_rows, 0.0)


def explicit_mask(
    q: torch.Tensor, k: torch.Tensor, *, mask: torch.Tensor | None, is_causal: bool
) -> tuple[torch.Tensor | None, bool]:
    """Mask and causal flag as torch's kernel understands them: never both, and the flag only for a square.

    The kernel aligns its causal triangle with the first key, ours with the last (equal when Sq == Sk).
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    if not is_causal or (mask is None and num_queries == num_keys):
        return mask, is_causal
    if mask is None and num_queries == 1:
        return None, False  # the last position sees everything
    triangle = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
    return (triangle[None, None] if mask is None else mask & triangle), False


def open_empty_rows(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Let queries that see no key see all of them, and say which they are so that their output can be zeroed.

    A softmax over nothing is 0/0: whether a kernel answers zeros or NaN, in both directions, is its own affair. With
    the row opened and its output replaced by zeros no kernel ever divides zero by zero.

    Returns:
        the mask without empty rows, and bool [B|1, N|1, Sq|1, 1], True where the query sees nothing.
    """
    empty_rows = ~mask.any(dim=-1, keepdim=True)
    return mask | empty_rows, empty_rows
