"""The public operators: check the arguments, then call the implementation of the tensor's device.

Shape letters: B batch, S sequence (q query, k key/value), N heads (kv: key/value heads), D head dimension.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from mindspeed_llm.platform.device import device_type

_IMPLEMENTATIONS = {
    "rms_norm": {"npu": "npu_rms_norm", "cuda": "torch fused rms_norm", "cpu": "torch rms_norm (composed)"},
    "rotary": {"npu": "npu_rotary_mul", "cuda": "torch rotary (composed)", "cpu": "torch rotary (composed)"},
    "swiglu": {"npu": "npu_swiglu", "cuda": "torch swiglu (composed)", "cpu": "torch swiglu (composed)"},
    "attention": {
        "npu": "npu_fusion_attention",
        "cuda": "torch scaled_dot_product_attention",
        "cpu": "torch scaled_dot_product_attention",
    },
}


def implementation(name: str) -> str:
    """What operator `name` ("rms_norm", "rotary", "swiglu", "attention") runs as on this process's device."""
    return _IMPLEMENTATIONS[name][device_type()]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False) -> torch.Tensor:
    """Root-mean-square norm over the last dimension (Zhang & Sennrich 2019), computed in at least fp32.

    Args:
        x: [..., D].
        weight: [D].
        eps: added to the mean square.
        unit_offset: False: y = norm(x) * weight, as Llama does. True: y = norm(x) * (1 + weight), as Gemma does.

    Returns:
        [..., D] in the promoted dtype of x and weight (unit_offset: in x's).
    """
    return _device_module(x).rms_norm(x, weight, eps, unit_offset=unit_offset)


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding (Su et al. 2021) in the half-rotation layout: pairs are (i, i + R/2).

    Args:
        q: [B, N, S, D] with unsqueeze_dim=1, [B, S, N, D] with unsqueeze_dim=2.
        k: the same with the key heads.
        cos, sin: [B or 1, S, R], R even, both halves equal. With R < D only the first R dimensions are rotated.
        unsqueeze_dim: where the heads axis stands.

    Returns:
        q and k, rotated, in their layout.
    """
    return _device_module(q).rotary(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotary position embedding of one tensor, see `rotary`, in any layout.

    Args:
        x: four-dimensional, the channels last.
        cos, sin: the same axes with length 1 where they do not count: [S, 1, 1, R] for x [S, B, N, D].

    Returns:
        x, rotated.
    """
    return _device_module(x).rotate(x, cos, sin)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (Shazeer 2020) for two tensors of the same shape [..., F]."""
    return _device_module(gate).swiglu(gate, up)


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
    """Softmax attention with grouped key/value heads: head n reads key/value head n // (N / Nkv).

    Args:
        q: [B, N, Sq, D].
        k: [B, Nkv, Sk, D], N a multiple of Nkv.
        v: [B, Nkv, Sk, Dv].
        mask: bool [B or 1, N or 1, Sq or 1, Sk], True = visible; None = everything visible. A query that sees no key
            gives zeros and passes no gradient.
        is_causal: the queries are the last Sq of the Sk positions and see no later one; combined with the mask.
        scale: factor of the scores before the softmax.
        dropout: probability of dropping an attention weight; the caller passes 0.0 outside training.

    Returns:
        [B, N, Sq, Dv].

    Raises:
        ValueError: a mask that is not bool or not four-dimensional, heads that do not divide, or more queries than
            keys with is_causal.
    """
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4):
        raise ValueError(
            f"attention mask must be bool [B|1, N|1, Sq|1, Sk] with True = visible, got {mask.dtype} "
            f"{tuple(mask.shape)}; an additive mask must be turned into bool first"
        )
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"{q.shape[1]} query heads cannot be shared out to {k.shape[1]} key/value heads")
    if is_causal and q.shape[2] > k.shape[2]:
        raise ValueError(f"causal attention of {q.shape[2]} queries to only {k.shape[2]} keys has no meaning")
    return _device_module(q).attention(q, k, v, mask=mask, is_causal=is_causal, scale=scale, dropout=dropout)


def _device_module(tensor: torch.Tensor) -> ModuleType:
    """The implementation that fits the tensor: a CPU tensor on a machine with an accelerator uses plain torch."""
    kind = tensor.device.type
    name = kind if kind in ("npu", "cuda") else "reference"
    return importlib.import_module(f"mindspeed_llm.platform.operators.{name}")
