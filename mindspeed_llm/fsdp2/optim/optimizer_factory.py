"""Building the optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_llm.fsdp2.config.training_config import TrainingConfig
from mindspeed_llm.platform.device import adamw_implementation


class OptimizerFactory:
    """`OptimizerFactory.create(model, config)`: AdamW over the (sharded) parameters of a model."""

    @staticmethod
    def create(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
        """AdamW; `optimizer: fused_adamw` uses torch's fused kernel everywhere, `adamw` what is best on the device (see
        `adamw_implementation`).

        Matrices decay by `weight_decay`; norm weights and biases (parameters of one dimension or none) only where
        `decay_norm_and_bias` asks for it. Learning rates are set by the trainer before every step.
        """
        groups = _parameter_groups(model, config)
        return torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            **({"fused": True} if config.optimizer == "fused_adamw" else adamw_implementation()),
        )


def _parameter_groups(model: nn.Module, config: TrainingConfig) -> list[dict]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decays = [p for p in parameters if p.ndim > 1 or config.decay_norm_and_bias]
    rest = [p for p in parameters if not (p.ndim > 1 or config.decay_norm_and_bias)]
    groups = []
    for members, decay in ((decays, config.weight_decay), (rest, 0.0)):
        # Sharded and whole parameters must not meet in one kernel call.
        for part in _split(members):
            groups.append({"params": part, "weight_decay": decay})
    return groups


def _split(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    sharded, whole = [], []
    for parameter in parameters:
        (sharded if isinstance(parameter, DTensor) else whole).append(parameter)
    return [part for part in (sharded, whole) if part]
