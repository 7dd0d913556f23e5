"""Where the tensors of a rank lie in the whole model: what `--ckpt-format torch_dist` writes, and what it reads.

megatron-core says it for the model, and for optimizers that are not distributed. Of distributed ones whole parameters
and moments are written, which lie where the parameters do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mindspeed_llm.core.shared_master import optimizer_parts
from mindspeed_llm.training.checkpointing import optimizer_state, rng
from mindspeed_llm.training.checkpointing.content import RNG
from mindspeed_llm.training.checkpointing.distributed_shards import PARAM, ByParameter
from mindspeed_llm.training.checkpointing.model_part import Part
from mindspeed_llm.training.setup import TrainingModel

FULLY_RESHARDABLE = "fully_reshardable"
MODEL = "model"
_STATE = "optimizer.state"
# What fp32 copies of parameters are called by optimizers of different kinds.
_MASTERS = (f"{_STATE}.{PARAM}.", f"{_STATE}.fp32_param.")


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How the tensors of a checkpoint are cut and called; megatron-core has several ways."""

    layers_together: bool = False
    """All layers in one tensor, instead of a tensor for each layer."""
    shards_apart: bool = False
    """Tensors of experts, of gate and of up on their own (`singleton_local_shards`)."""

    def options(self) -> dict[str, Any]:
        """What megatron-core's `sharded_state_dict` is told."""
        return {
            "distrib_optim_sharding_type": FULLY_RESHARDABLE,
            "singleton_local_shards": self.shards_apart,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }


OURS = Naming()


def model_tensors(model: TrainingModel, naming: Naming = OURS) -> dict[str, dict[str, Any]]:
    """The chunks of this rank by their keys in the state; each entry says where its tensor lies in the whole model."""
    found: dict[str, dict[str, Any]] = {}
    modules: list[Any] = model.modules
    for index, module in enumerate(modules):
        with _layers_together(module) if naming.layers_together else nullcontext():
            name = MODEL if len(modules) == 1 else f"{MODEL}{index}"
            found[name] = module.sharded_state_dict(metadata=naming.options())
    return found


def part_of(tensors: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """The entries of one chunk that belong to a part of the model."""
    return {name: place for name, place in tensors.items() if part.name_of(name) is not None}


@contextmanager
def _layers_together(module: Any) -> Iterator[None]:
    """Our configurations have megatron-core name each layer."""
    config = module.decoder.config
    before = config.hetereogenous_dist_checkpoint, config.moe_layer_freq
    try:
        config.hetereogenous_dist_checkpoint, config.moe_layer_freq = False, 1
        yield
    finally:
        config.hetereogenous_dist_checkpoint, config.moe_layer_freq = before


def optimizer_tensors(
    model: TrainingModel, chunks: Mapping[str, Any], wholes: list[ByParameter | None], naming: Naming = OURS
) -> list[Any]:
    """For each optimizer its tensors, placed as its parameters are.

    Args:
        chunks: what `model_tensors` gave.
        wholes: for each distributed optimizer its whole parameters and moments, where this rank has them.
    """
    found: list[Any] = []
    for part, whole in zip(optimizer_parts(model.optimizer), wholes, strict=True):
        if isinstance(part, DistributedOptimizer):
            found.append(_placed(whole, chunks) if whole is not None else {})
        elif optimizer_state.parameters(part):
            found.append(part.sharded_state_dict(chunks, metadata=naming.options()))
        else:
            found.append({})
    return found


def _placed(whole: ByParameter, chunks: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Whole parameters and moments under megatron-core's names: `optimizer.state.exp_avg.<name of the parameter>`."""
    tensors, _ = extract_sharded_tensors_and_factories(chunks)
    places = {id(place.data): place for place in nested_values(tensors)}
    return {
        number: {name: _like(places[id(parameter)], name, values) for name, values in states.items()}
        for number, (parameter, states) in enumerate(whole.items())
    }


def _like(place: Any, name: str, values: torch.Tensor) -> Any:
    changes: dict[str, Any] = {"key": f"{_STATE}.{name}.{place.key}", "data": values}
    if isinstance(place, ShardedTensor):
        changes["dtype"] = values.dtype
    return replace(place, **changes)


def random_place(states: Any) -> ShardedObject:
    """Where the random states of the data-parallel ranks of this tensor and pipeline rank lie."""
    here = rng.Place.here()
    return ShardedObject(RNG, states, (here.pp[1], here.tp[1]), (here.pp[0], here.tp[0]), replica_id=here.dp[0])


def master_names(key: str) -> list[str]:
    """Where the fp32 copy of a parameter may lie that an optimizer calls `key`: each kind has its name for it. Empty
    where `key` is no such copy.
    """
    name = next((key.removeprefix(prefix) for prefix in _MASTERS if key.startswith(prefix)), None)
    return [] if name is None else [f"{prefix}{name}" for prefix in _MASTERS]
