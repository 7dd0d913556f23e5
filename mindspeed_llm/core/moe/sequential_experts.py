"""Experts with matrices of their own, one after the other; and which data-parallel ranks share an expert."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.experts import SequentialMLP
from torch import nn

from mindspeed_llm.core.config import LlmConfig


class SequentialExperts(SequentialMLP):
    """megatron-core's `SequentialMLP`, whose gradients are summed over all ranks that have the same experts."""

    def __init__(self, num_local_experts: int, config: LlmConfig, submodules: Any, pg_collection: Any = None) -> None:
        super().__init__(num_local_experts, config, submodules, pg_collection=pg_collection)
        mark_experts(self, config)


def mark_experts(experts: nn.Module, config: LlmConfig) -> None:
    """Tell megatron-core which data-parallel group the experts' gradients belong to.

    It sums them over the experts' own group (`expert_data_parallel`) where `allreduce` is false, and says so itself
    with expert parallelism only. Whole experts under tensor parallelism (expert TP 1, TP 2) have a group of their own
    as well: each tensor parallel rank sends other tokens through them.
    """
    own_group = (
        config.expert_model_parallel_size > 1 or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    )
    for parameter in experts.parameters():
        parameter.allreduce = not own_group  # type: ignore[attr-defined]
