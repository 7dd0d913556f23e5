"""`--log-params-norm`: the L2 norm of all weights of the model."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from mindspeed_llm.platform.device import current_device
from mindspeed_llm.training.setup import TrainingModel, complete_weights


def params_norm(model: TrainingModel) -> float:
    """The norm over all stages and shards, each weight once (a collective). Rows that pad the vocabulary count, too."""
    squares = torch.zeros(2, dtype=torch.float32, device=current_device())
    with complete_weights(model), torch.no_grad():
        for module in model.modules:
            for parameter in module.parameters():
                # megatron-core's mark of the weights of experts, which have groups of their own.
                is_expert = not getattr(parameter, "allreduce", True)
                group = (
                    parallel_state.get_expert_tensor_parallel_group()
                    if is_expert
                    else parallel_state.get_tensor_model_parallel_group()
                )
                if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, group):
                    squares[int(is_expert)] += parameter.float().norm() ** 2
    dense, experts = squares[:1], squares[1:]
    dist.all_reduce(dense, group=parallel_state.get_model_parallel_group())
    dist.all_reduce(experts, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return math.sqrt(float(dense + experts))
