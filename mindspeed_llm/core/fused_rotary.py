"""Rotary positions on the device's fused kernel, at the place where megatron-core's attention layers apply them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_llm.platform import operators


def with_fused_kernel(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A wrapper of `apply_rotary_pos_emb`: the same numbers, by `platform.operators.rotate`.

    All layers are given the same tensor of angles, whose cosines and sines are computed once.
    """
    last: tuple[tuple[Tensor, float, torch.dtype], tuple[Tensor, Tensor]] | None = None

    def apply(
        t: Tensor,
        freqs: Tensor,
        config: Any,
        cu_seqlens: Tensor | None = None,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> Tensor:
        """t [S, B, N, D], freqs [S, B or 1, 1, R]: the angles"""
        if cu_seqlens is not None or config.multi_latent_attention or config.rotary_interleaved:
            return original(t, freqs, config, cu_seqlens, mscale, cp_group)
        nonlocal last
        # The tensor itself is kept, so that no other one can stand at its address.
        if last is None or last[0][0] is not freqs or last[0][1:] != (mscale, t.dtype):
            cos, sin = ((part * mscale).to(t.dtype) for part in (freqs.cos(), freqs.sin()))
            last = (freqs, mscale, t.dtype), (cos, sin)
        return operators.rotate(t, *last[1])

    return apply
