"""Rotary positions on the device's fused kernel, at the place where megatron-core's attention layers apply them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mindspeed_llm.platform import operators


def with_fused_kernel(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A wrapper of `apply_rotary_pos_emb`: the same numbers, by `platform.operators.rotate`."""

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
        cos, sin = ((part * mscale).to(t.dtype) for part in (freqs.cos(), freqs.sin()))
        return operators.rotate(t, cos, sin)

    return apply
