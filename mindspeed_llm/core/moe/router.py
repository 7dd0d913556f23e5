"""The router: its auxiliary losses weigh the same on every topology, and it counts tokens exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    save_to_aux_losses_tracker,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

# What a step counts, and the bias that is moved by it. They are buffers, which a model in bf16 has in bf16: there
# 256 + 1 is 256.
_COUNTS = ("expert_bias", "local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")


class Router(TopKRouter):
    """megatron-core's `TopKRouter`, with the scale of its auxiliary losses and the dtype of its counts put right.

    Gradients are summed over all tokens and divided at the end of a step: by the number of its targets, or of whatever
    its loss counts. So the mean loss of a micro step has to enter with the number of its tokens, times that number per
    token of the step (`LlmConfig.router_loss_scale`). Auxiliary losses then weigh their coefficient, however many
    positions have a target. megatron-core takes this rank's tokens alone: under sequence parallelism the losses then
    weigh 1 / TP, and the loss per sequence 1 / (micro batch) of what they should.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """See `torch.nn.Module`. Counts keep their numbers where the model is cast to another dtype: a bias that was
        rounded chooses other experts.
        """
        before = {name: count for name in _COUNTS if (count := getattr(self, name, None)) is not None}
        super()._apply(fn, recurse)
        for name, count in before.items():
            after = getattr(self, name)
            if after.dtype != count.dtype:
                after.data = count.to(after.device)
        return self

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        reduce_group: torch.distributed.ProcessGroup,
        reduce_group_has_dp: bool = False,
        valid_token_count: Any = None,
    ) -> Tensor:
        """See `TopKRouter`. `aux_loss` is this rank's part of a mean over the tokens of `reduce_group`."""
        return super().attach_and_log_load_balancing_loss(
            activation,
            aux_loss_coeff,
            aux_loss,
            aux_loss_name,
            reduce_group,
            reduce_group_has_dp=reduce_group_has_dp,
            valid_token_count=activation.shape[0] * reduce_group.size() * self.config.router_loss_scale,
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach the loss on the size of the logits [tokens, experts] (Zoph et al. 2022, equation 5)."""
        coeff = self.config.moe_z_loss_coeff
        if coeff is None or not self.training or not torch.is_grad_enabled():
            return logits
        assert padding_mask is None, "tokens of padding are not told to the router"
        loss = z_loss_func(logits, coeff)
        group = self.tp_cp_group
        save_to_aux_losses_tracker(
            "z_loss", loss / (coeff * group.size()), self.layer_number, self.config.num_layers, reduce_group=group
        )
        return MoEAuxLossAutoScaler.apply(logits, loss * (logits.shape[0] * self.config.router_loss_scale))
