"""The activation of gated MLPs on the device's fused kernel."""

from __future__ import annotations

from torch import Tensor

from mindspeed_llm.platform import operators


def fused_swiglu(joined: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020) of [..., 2 * F], gate first -> [..., F]."""
    gate, up = joined.chunk(2, dim=-1)
    return operators.swiglu(gate, up)
