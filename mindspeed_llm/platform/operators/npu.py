"""Ascend implementations through torch_npu. Arguments and results are those of `dispatch`.

torch_npu is imported inside each function: this file can then be read, scanned and tested where there is no NPU.
"""

from __future__ import annotations

import functools

import torch

from mindspeed_llm.platform.operators.reference import open_empty_rows

_CAUSAL = 3  # sparse_mode: triangle aligned with the last key; takes the constant compressed mask, whatever S is
_DENSE = 1  # sparse_mode: the given mask alone decides, the window arguments are ignored
_COMPRESSED_MASK_SIZE = 2048


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False) -> torch.Tensor:
    """See `dispatch.rms_norm`. The kernel wants one dtype; 1 + weight in bf16 would lose the weight, hence fp32.

    The library's own Gemma variant has no gradient, so it is not used.
    """
    import torch_npu

    if unit_offset:
        return torch_npu.npu_rms_norm(x.float(), 1.0 + weight.float(), epsilon=eps)[0].to(x.dtype)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return torch_npu.npu_rms_norm(x.to(dtype), weight.to(dtype), epsilon=eps)[0]


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `dispatch.rotary`."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `dispatch.rotate`."""
    import torch_npu

    rotated_dims = cos.shape[-1]
    x, rest = x[..., :rotated_dims], x[..., rotated_dims:]
    dtype = torch.promote_types(x.dtype, cos.dtype)
    y = torch_npu.npu_rotary_mul(x.to(dtype), cos.to(dtype), sin.to(dtype), rotary_mode="half")
    return torch.cat((y, rest), dim=-1) if rest.shape[-1] else y


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `dispatch.swiglu`. The kernel takes gate and up side by side in one tensor."""
    import torch_npu

    return torch_npu.npu_swiglu(torch.cat((gate, up), dim=-1), dim=-1)


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
    """See `dispatch.attention`.

    The kernel's mask says what is hidden (True = masked out), its scale defaults to 1, it repeats grouped heads by
    itself, and without a mask tensor it ignores every causal or window setting.
    """
    import torch_npu

    hidden, empty_rows, sparse_mode = None, None, 0
    if mask is not None:
        num_queries, num_keys = q.shape[2], k.shape[2]
        if is_causal:
            mask = mask & ~_later_keys(num_queries, num_keys, q.device)
        # Supported: [B, N, Sq, Sk], [B, 1, Sq, Sk] and [1, 1, Sq, Sk]; not [1, N, ...], and no axis Sq of size 1.
        batch = q.shape[0] if mask.shape[1] != 1 else mask.shape[0]
        mask = mask.expand(batch, mask.shape[1], num_queries, num_keys)
        visible, empty_rows = open_empty_rows(mask)
        hidden, sparse_mode = visible.logical_not(), _DENSE
    elif is_causal:
        hidden, sparse_mode = _compressed_causal_mask(q.device), _CAUSAL
    out = torch_npu.npu_fusion_attention(
        q,
        k,
        v,
        q.shape[1],
        "BNSD",
        atten_mask=hidden,
        scale=scale,
        keep_prob=1.0 - dropout,
        sparse_mode=sparse_mode,
    )[0]
    return out if empty_rows is None else out.masked_fill(empty_rows, 0.0)


def _later_keys(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """bool [Sq, Sk], True above the diagonal that ends at the last query and the last key."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).triu(num_keys - num_queries + 1)


@functools.cache
def _compressed_causal_mask(device: torch.device) -> torch.Tensor:
    """The constant mask of the causal sparse modes: built once per device, 4 MiB."""
    return _later_keys(_COMPRESSED_MASK_SIZE, _COMPRESSED_MASK_SIZE, device)
