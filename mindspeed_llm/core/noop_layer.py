"""Layers that do nothing: they fill up pipeline stages, and count in the numbering of layers only."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import BaseTransformerLayer, get_transformer_layer_offset
from torch import Tensor

# As `TransformerBlock` names its layers: 12 in decoder.layers.12.mlp.linear_fc1.weight is the position.
_LAYER_OF_KEY = re.compile(r"(?<=\bdecoder\.layers\.)\d+(?=\.)")


class NoopLayer(MegatronModule, BaseTransformerLayer):
    """Hands its input on. It has no parameters, keeps nothing for the backward pass, and copies nothing."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config=config)
        stage = (pg_collection or ProcessGroupCollection.use_mpu_process_groups()).pp.rank()
        self.layer_number = layer_number + get_transformer_layer_offset(config, vp_stage, stage)

    def forward(self, hidden_states: Tensor, context: Tensor | None = None, **_: Any) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> the same tensor."""
        return hidden_states, context

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Nothing is saved."""
        return {}


def specs_at(positions: range, noop_layers: Collection[int], spec_of: Callable[[int], ModuleSpec]) -> list[ModuleSpec]:
    """The layers of a chunk: `spec_of(position)`, or a noop layer.

    A chunk of noop layers only has no layers at all. Then megatron-core's block copies its input, which the schedule
    needs: it frees a chunk's output once it is sent, while the input must stay for the backward pass.
    """
    if all(position in noop_layers for position in positions):
        return []
    return [ModuleSpec(module=NoopLayer) if p in noop_layers else spec_of(p) for p in positions]


def without_gaps(state: ShardedStateDict, noop_layers: Collection[int]) -> ShardedStateDict:
    """Name the layers of a distributed checkpoint by their number in the model instead of their position.

    Such a checkpoint can then be loaded with other noop layers, or none. Changes `state`, a model's
    `sharded_state_dict` with a key for each layer (`hetereogenous_dist_checkpoint`), and returns it.
    """
    for tensor in state.values() if noop_layers else ():
        if hasattr(tensor, "key"):
            tensor.key = _LAYER_OF_KEY.sub(lambda found: str(_layer(int(found[0]), noop_layers)), tensor.key)
    return state


def _layer(position: int, noop_layers: Collection[int]) -> int:
    return position - sum(noop < position for noop in noop_layers)
