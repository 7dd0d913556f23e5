"""Layers of a model that are computed without a graph: gradients end above them.

    trained layers      keep what their backward pass needs
    ----------------    the output of the last local layer asks for gradients
    local layers        keep nothing, are never computed again, and no gradient passes them

With pipeline parallelism the schedule sends gradients to every stage and wants some from it. A stage that begins with
local layers sends zeros to the one before, which has local layers alone and leaves them lie.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import make_viewless_tensor
from torch import Tensor


class BlockWithLocalLayers(TransformerBlock):
    """megatron-core's block whose first layers are local; `without_graph` makes it of one."""

    num_local: int
    """How many, with the noop layers between them."""
    entry: Tensor | None
    """What the stage before has sent for the next forward pass."""

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """See `TransformerBlock`; the local layers get the values alone."""
        self.entry = input_tensor
        super().set_input_tensor(None if input_tensor is None else input_tensor.detach())

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """See `TransformerBlock`."""
        output = super().forward(*arguments, **options)
        entry, self.entry = self.entry, None
        if entry is None or not (entry.requires_grad and torch.is_grad_enabled()):
            return output
        # The schedule frees what it has sent, for which it must be no view.
        return make_viewless_tensor(_WithZerosFor.apply(output, entry), requires_grad=True, keep_graph=True)

    def _get_layer(self, layer_number: int) -> Any:
        # The last of the units that are recomputed may be longer than what is left.
        place = self.num_local + layer_number
        return super()._get_layer(place) if place < len(self.layers) else _nothing

    def _checkpointed_forward(self, hidden_states: Tensor, context: Tensor, **options: Any) -> Tensor:
        """The local layers, then the others, of which some are recomputed: they count from the first one that is
        trained.
        """
        shared = {name: options[name] for name in _OF_LAYERS if name in options}
        for layer in self.layers[: self.num_local]:
            hidden_states, context = layer(hidden_states=hidden_states, context=context, **shared)
        if self.num_local == len(self.layers):
            return hidden_states
        return super()._checkpointed_forward(hidden_states=hidden_states, context=context, **options)


_OF_LAYERS = (
    "attention_mask",
    "context_mask",
    "rotary_pos_emb",
    "attention_bias",
    "packed_seq_params",
    "padding_mask",
)
"""What `TransformerBlock._checkpointed_forward` hands on to layers."""


def without_graph(block: TransformerBlock, count: int) -> None:
    """Compute the first `count` layers of a block, of which there is at least one, without a graph."""
    assert type(block) is TransformerBlock, type(block)
    block.__class__ = BlockWithLocalLayers
    assert isinstance(block, BlockWithLocalLayers)
    block.num_local, block.entry = count, None
    block.num_layers_per_pipeline_rank = len(block.layers) - count
    for position, layer in enumerate(block.layers[:count]):
        is_last = position == count - 1 and count < len(block.layers)
        layer.forward = partial(_without_graph, layer.forward, begins_graph=is_last)


def _nothing(hidden_states: Tensor, context: Tensor | None, **_: Any) -> tuple[Tensor, Tensor | None]:
    """A layer that is not there."""
    return hidden_states, context


def _without_graph(
    forward: Callable[..., Any], hidden_states: Tensor, *arguments: Any, begins_graph: bool, **options: Any
) -> tuple[Tensor, Tensor | None]:
    with torch.no_grad():
        output, context = forward(hidden_states, *arguments, **options)
    if begins_graph and torch.is_grad_enabled():
        # From here on, as from the embedding without local layers, see `attach`.
        output = output.detach().requires_grad_(True)
    return output, context


class _WithZerosFor(torch.autograd.Function):
    """Hands a block's output on, and gives zeros to its entry for a gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, entry: Tensor) -> Tensor:
        ctx.entry = (entry.shape, entry.dtype, entry.device)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        shape, dtype, device = ctx.entry
        return gradient, torch.zeros(shape, dtype=dtype, device=device)
