"""All experts of a rank in two matrices, on any device and in any dtype.

megatron-core's `GroupedMLP` needs a package for CUDA and takes bf16 only. The names, shapes and layout of its
parameters are the ones of its checkpoints, and are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_gpu
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import GroupedMLP
from torch import Tensor

from mindspeed_llm.core.config import LlmConfig
from mindspeed_llm.core.moe.sequential_experts import mark_experts
from mindspeed_llm.core.swiglu import fused_swiglu
from mindspeed_llm.platform.device import current_device


class GroupedExperts(MegatronModule):
    """Gated MLPs of several experts.

    `weight1` [hidden, experts * 2 * ffn] is the memory of [experts, hidden, 2 * ffn] (gate, then up), `weight2`
    [experts * ffn, hidden] that of [experts, ffn, hidden]; ffn is this rank's share under expert tensor parallelism.
    """

    sharded_state_dict = GroupedMLP.sharded_state_dict

    def __init__(self, num_local_experts: int, config: LlmConfig, pg_collection: Any = None) -> None:
        super().__init__(config=config)
        assert not config.add_bias_linear and config.gated_linear_unit, "experts are gated MLPs without biases"
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        self.activation_recompute = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )
        ffn = config.moe_ffn_hidden_size // self.tp_group.size()
        hidden = config.hidden_size
        # On the device at once: the random numbers that tell ranks' experts apart are those of its generator.
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": current_device()}
        self.weight1 = torch.nn.Parameter(torch.empty(hidden, num_local_experts * 2 * ffn, **options))
        self.weight2 = torch.nn.Parameter(torch.empty(num_local_experts * ffn, hidden, **options))
        for weight, init, dim in (
            (self.weight1, config.init_method, 1),
            (self.weight2, config.output_layer_init_method, 0),
        ):
            if config.perform_initialization:
                _initialize_affine_weight_gpu(weight, init, partition_dim=dim, is_expert=True)
        mark_experts(self, config)
        self.register_load_state_dict_post_hook(_forget_extra_states)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probabilities: Tensor) -> tuple[Tensor, None]:
        """tokens [T, H] sorted by expert, how many each has [experts], their weights [T] -> [T, H], no bias."""
        counts = tokens_per_expert.tolist()
        joined = self.first_products(tokens, counts)
        if not self.activation_recompute:
            return self.second_products(self._activate(joined, probabilities), counts), None
        checkpoint = CheckpointWithoutOutput(fp8=None)  # its default is read as fp8
        output = self.second_products(checkpoint.checkpoint(self._activate, joined, probabilities), counts)
        checkpoint.discard_output_and_register_recompute(output)
        return output, None

    def first_products(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """tokens [T, H], of which expert i has the next counts[i] -> gate and up [T, 2 * ffn]"""
        return multiply(tokens, counts, self.weight1.view(self.num_local_experts, self.config.hidden_size, -1))

    def second_products(self, inner: Tensor, counts: Sequence[int]) -> Tensor:
        """[T, ffn] -> [T, H]; with expert tensor parallelism this rank's part of the sum"""
        return multiply(inner, counts, self.weight2.view(self.num_local_experts, -1, self.config.hidden_size))

    def _activate(self, joined: Tensor, probabilities: Tensor) -> Tensor:
        """gate and up [T, 2 * ffn], weights of the tokens [T] -> [T, ffn]"""
        if self.config.fused_swiglu:
            inner = fused_swiglu(joined)
        else:
            gate, up = joined.chunk(2, dim=-1)
            inner = self.config.activation_func(gate) * up
        return (inner * probabilities.unsqueeze(-1)).to(inner.dtype)


def multiply(rows: Tensor, counts: Sequence[int], weights: Tensor) -> Tensor:
    """rows [T, in], of which expert i has the next counts[i], times weights[i] [in, out] -> [T, out]

    Also experts without rows take part, so that their weights have gradients on every rank.
    """
    return torch.cat([part @ weight for part, weight in zip(rows.split(counts), weights, strict=True)])


def _forget_extra_states(module: torch.nn.Module, keys: Any) -> None:
    """Distributed checkpoints have an empty entry for each linear layer of experts that are not grouped."""
    keys.unexpected_keys[:] = [key for key in keys.unexpected_keys if not key.endswith("._extra_state")]
