"""Norms for megatron-core's layers, also under sequence parallelism.

megatron-core's own wrapper of torch's norms refuses sequence parallelism. There each rank sees a part of the sequence
only, so that the gradients of a norm's parameters have to be summed over tensor parallel ranks: the mark on them makes
megatron-core's `finalize_model_grads` do it.
"""

from __future__ import annotations

import torch
from torch import nn

from mindspeed_llm.core.config import LlmConfig
from mindspeed_llm.platform import operators
from mindspeed_llm.platform.device import current_device
from mindspeed_llm.platform.operators import reference


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019), the mean computed in fp32."""

    def __init__(self, config: LlmConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=current_device()))
        _mark(self, config)
        self.eps = eps
        self._norm = operators.rms_norm if config.fused_rmsnorm else reference.rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D] in the dtype of x."""
        return self._norm(x, self.weight, self.eps).to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """torch's layer norm over the last dimension (Ba et al. 2016)."""

    def __init__(self, config: LlmConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype, device=current_device())
        _mark(self, config)


def _mark(norm: nn.Module, config: LlmConfig) -> None:
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
