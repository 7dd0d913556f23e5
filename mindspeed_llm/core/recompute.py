"""Recomputation of activations beyond what megatron-core has: wrappers of its forward passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

Forward = Callable[..., Any]


def without_fp8(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `CheckpointWithoutOutput.__init__`: its default says no fp8, but is read as if it said fp8."""

    def told(self: CheckpointWithoutOutput, fp8: Any = None) -> None:
        init(self, fp8=fp8 or None)

    return told


def recomputing_activation(forward: Forward) -> Forward:
    """Wrap `MLP.forward`: the activation function's output is dropped once the second linear layer has read it, and
    computed again when the gradient of that layer's output arrives.

    What lies between the two linear layers stays megatron-core's: its own forward pass is run on a stand-in whose first
    layer returns what the real one has computed, and whose second layer returns its input.
    """

    def recomputed(
        self: MLP, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        inner, bias = self.linear_fc1(hidden_states)

        def activate(inner: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
            between = SimpleNamespace(
                config=self.config,
                activation_func=self.activation_func,
                linear_fc1=lambda _: (inner, bias),
                linear_fc2=lambda activated: (activated, None),
            )
            return forward(between, None, scale, **options)[0]

        checkpoint = CheckpointWithoutOutput()
        activated = checkpoint.checkpoint(activate, inner, bias, per_token_scale)
        output, output_bias = self.linear_fc2(activated)
        checkpoint.discard_output_and_register_recompute(output)
        assert per_token_scale is None or output_bias is None, "experts have no biases"
        return output, output_bias

    return recomputed


def with_share_of_stage(forward: Forward, *, num_parts: int) -> Forward:
    """Wrap `TransformerBlock._checkpointed_forward`: `recompute_num_layers` counts layers of all parts of a stage.

    They are dealt out in turns. Of 3 layers to recompute, with 2 parts, the first part gets 2 and the second 1:

        [0* 1* 2] [6* 7 8]        the layers of one stage, the recomputed ones marked

    Args:
        forward: the original.
        num_parts: virtual stages of each rank.
    """

    def of_share(self: TransformerBlock, *arguments: Any, **options: Any) -> Any:
        config, part = self.config, self.vp_stage or 0
        # A copy for the length of the call: the parts of a stage share their configuration.
        self.config = copy.copy(config)
        self.config.recompute_num_layers = share_of(config.recompute_num_layers, part, num_parts)
        try:
            return forward(self, *arguments, **options)
        finally:
            self.config = config

    return of_share


def share_of(num_layers: int, part: int, num_parts: int) -> int:
    """How many of `num_layers` the part gets when they are dealt out to `num_parts` parts in turns, the first first."""
    return (num_layers - part + num_parts - 1) // num_parts
