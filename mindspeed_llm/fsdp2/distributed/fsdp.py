"""Sharding of parameters, gradients and optimizer state (torch's fully_shard)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from mindspeed_llm.fsdp2.config.parallel_config import ParallelConfig
from mindspeed_llm.fsdp2.distributed.mesh import DataMesh
from mindspeed_llm.fsdp2.distributed.modules import find_modules
from mindspeed_llm.platform import distributed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """What the trainer needs to know about the sharding of a model.

    `replicated` are parameters that were left whole on every rank (`parallel.ignored_modules`): FSDP does not reduce
    their gradients, `reduce_replicated_gradients` does. `root` is None where nothing is sharded (one rank, fp32).
    """

    root: FSDPModule | None
    replicated: list[nn.Parameter]
    reshard_after_forward: bool


def apply_fsdp(model: nn.Module, *, mesh: DataMesh, config: ParallelConfig) -> ShardedModel:
    """Shard `model` over `mesh`: one group per module that `fsdp_modules` names, and one for what is left.

    Modules that share a parameter (tied embeddings) form one group, since a group must own its parameters: the group is
    gathered when the first of them runs and released after the last one.

    One rank that computes in fp32 has nothing to share and nothing to cast: its model stays as it is, since FSDP would
    copy every weight and gradient once a step for nothing.
    """
    ignored = find_modules(model, config.ignored_modules or (), field="parallel.ignored_modules")
    # A list beside the set: gradients are reduced in this order, which must be the same on every rank.
    replicated = list(dict.fromkeys(parameter for module in ignored.values() for parameter in module.parameters()))
    ignored_params = set(replicated)
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.param_dtype],
        reduce_dtype=DTYPES[config.reduce_dtype],
        cast_forward_inputs=config.param_dtype != "fp32",
    )
    common = {"mesh": mesh.mesh, "mp_policy": policy, "ignored_params": ignored_params or None}
    groups = module_groups(model, config)
    if mesh.size == 1 and config.param_dtype == "fp32":
        return ShardedModel(root=None, replicated=replicated, reshard_after_forward=False)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for group in groups:
        fully_shard(
            group if len(group) > 1 else group[0],
            # The output head runs last and is the first that backward needs: to release it would be to gather it twice.
            reshard_after_forward=config.reshard_after_forward and head not in group,
            shard_placement_fn=_placement(config.shard_placement_fn, mesh.shards),
            **common,
        )
    fully_shard(model, reshard_after_forward=config.reshard_after_forward, **common)
    if not distributed.averages_in_collectives():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    _set_prefetch([group[0] for group in groups], config)
    return ShardedModel(root=model, replicated=replicated, reshard_after_forward=config.reshard_after_forward)


def module_groups(model: nn.Module, config: ParallelConfig) -> list[list[nn.Module]]:
    """The modules that are sharded as units, inner ones first; modules that share a parameter stand in one group."""
    modules = find_modules(model, config.fsdp_modules, field="parallel.fsdp_modules")
    ignored = find_modules(model, config.ignored_modules or (), field="parallel.ignored_modules")
    ignored_params = {parameter for module in ignored.values() for parameter in module.parameters()}
    return _groups_by_shared_parameters(_outermost_last(modules), ignored_params)


def set_micro_step(model: ShardedModel, *, is_last: bool) -> None:
    """Tell FSDP whether gradients are reduced in the coming backward: once per optimizer step, in its last micro step.

    Where `reshard_after_forward` is off, the gathered parameters also stay in place between micro steps, so that
    nothing is communicated before the last one.
    """
    if model.root is None:
        return
    model.root.set_requires_gradient_sync(is_last)
    model.root.set_is_last_backward(is_last)
    if not model.reshard_after_forward:
        model.root.set_reshard_after_backward(is_last)


def reduce_replicated_gradients(model: ShardedModel, world_size: int) -> None:
    """Average over all ranks the gradients of the parameters that FSDP leaves alone, as it does with its own."""
    if world_size == 1:
        return
    for parameter in model.replicated:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world_size)


def _placement(name: str | None, shards: int) -> Callable[[nn.Parameter], Shard | None] | None:
    if name in (None, "shard_by_dim_0"):
        return None

    def second_dimension(parameter: nn.Parameter) -> Shard | None:
        # FSDP shards other dimensions than the first only evenly; what does not fit falls back to the first.
        fits = parameter.ndim > 1 and parameter.shape[1] % shards == 0
        return Shard(1) if fits else None

    return second_dimension


def _outermost_last(modules: dict[str, nn.Module]) -> list[nn.Module]:
    """Inner modules before the ones that contain them, as fully_shard asks; otherwise in the order of registration."""
    names = list(modules)
    depth = {name: sum(name.startswith(f"{other}.") for other in names) for name in names}
    return [modules[name] for name in sorted(names, key=lambda name: -depth[name])]


def _groups_by_shared_parameters(modules: list[nn.Module], ignored: set[nn.Parameter]) -> list[list[nn.Module]]:
    groups: list[list[nn.Module]] = []
    owner: dict[nn.Parameter, list[nn.Module]] = {}
    for module in modules:
        parameters: Iterable[nn.Parameter] = [p for p in module.parameters() if p not in ignored]
        shared = next((owner[p] for p in parameters if p in owner and not _contains(module, owner[p])), None)
        if shared is None:
            shared = []
            groups.append(shared)
        shared.append(module)
        for parameter in parameters:
            owner.setdefault(parameter, shared)
    return groups


def _contains(module: nn.Module, group: list[nn.Module]) -> bool:
    inner = set(module.modules())
    return any(member in inner for member in group)


def _set_prefetch(modules: list[FSDPModule], config: ParallelConfig) -> None:
    for i, module in enumerate(modules):
        if following := modules[i + 1 : i + 1 + config.num_to_forward_prefetch]:
            module.set_modules_to_forward_prefetch(following)
        if preceding := modules[max(i - config.num_to_backward_prefetch, 0) : i]:
            module.set_modules_to_backward_prefetch(preceding[::-1])
