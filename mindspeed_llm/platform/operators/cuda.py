"""CUDA implementations: torch's fused kernels where it has them. Arguments and results are those of `dispatch`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mindspeed_llm.platform.operators.reference import explicit_mask, open_empty_rows, rotary, rotate, swiglu

# torch has no fused rotary embedding and no fused SwiGLU on this device.
__all__ = ["attention", "rms_norm", "rotary", "rotate", "swiglu"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False) -> torch.Tensor:
    """See `dispatch.rms_norm`. The kernel wants one dtype; 1 + weight in bf16 would lose the weight, hence fp32."""
    if unit_offset:
        return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).to(x.dtype)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps)


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
    """See `dispatch.attention`."""
    mask, is_causal = explicit_mask(q, k, mask=mask, is_causal=is_causal)
    empty_rows = None
    groups = q.shape[1] // k.shape[1]
    if mask is not None:
        mask, empty_rows = open_empty_rows(mask)
        if groups > 1:
            # The kernels that take a mask do not take grouped heads: torch would fall back to the one that
            # materialises the scores. Repeating the keys and values costs far less.
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return out if empty_rows is None else out.masked_fill(empty_rows, 0.0)
