"""megatron-core's configuration of a transformer, and what ours has beyond it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class LlmConfig(TransformerConfig):
    """`TransformerConfig` with the fields that modules of this package read. Keyword arguments only."""

    vocab_size: int = 0
    """Tokens of the model; the embedding may have more rows, for which no token stands."""
    flash_attention: bool = False
    """Attention by the device's fused kernel, which does not keep the scores."""
    fused_rmsnorm: bool = False
    """Norms by the device's fused kernel."""
    fused_swiglu: bool = False
    """The activation of gated MLPs by the device's fused kernel."""
    overlapped_linear_chunks: int = 1
    """Chunks in which linear layers of tensor parallelism are computed and sent; 1: megatron-core's own layers."""
    rope_scaling: dict[str, Any] | None = None
    """How rotary positions are stretched, in the words of transformers: `rope_type`, `factor`, ..."""
    router_loss_scale: float = 1.0
    """What a step's gradients are divided by, per token of the step: the trainer sets it before each step in which the
    two differ (positions without a target, pairs). Auxiliary losses of routers are multiplied by it."""
    noop_layers: tuple[int, ...] = ()
    """Positions of layers that do nothing, counted with them."""
