"""The state of megatron-core's optimizers, without what megatron-core can do with Transformer Engine or Apex only.

Those keep the number of steps in a group of parameters. torch's optimizers keep it in the state of each parameter,
where megatron-core's loading functions trip over it, and where there is none before the first step.

A run has a chain of optimizers: of the experts, and of everything else. Each of them is of one of three kinds:

    FP32Optimizer                         the parameters are those of the model
    Float16OptimizerWithFloat16Params     fp32 copies of the model's parameters
    DistributedOptimizer                  flat shards, over data-parallel ranks, of the buffers that hold the parameters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor

from mindspeed_llm.checkpoints.files import DamagedCheckpoint
from mindspeed_llm.core.shared_master import optimizer_parts
from mindspeed_llm.tasks.checkpoint.torch_file import StoredTensor

STEP = "step"
MASTERS = "fp32_from_fp16_params"
MOMENTS = ("exp_avg", "exp_avg_sq")
_KINDS = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)


def kind(optimizer: MegatronOptimizer) -> str:
    """What the state of an optimizer looks like, for messages and for comparison."""
    found = {kind.__name__ for part in optimizer_parts(optimizer) for kind in _KINDS if isinstance(part, kind)}
    return "+".join(sorted(found))


def parameters(part: MegatronOptimizer) -> list[Tensor]:
    """What an optimizer updates, in the order of the numbers that its `state_dict` uses."""
    return [parameter for group in part.optimizer.param_groups for parameter in group["params"]]


def allocate(optimizer: MegatronOptimizer) -> None:
    """Give parameters that have no state the one that they would have after no step.

    Before the first step (also where the first steps were all skipped) megatron-core can neither write nor load.
    """
    for part in optimizer_parts(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                if state:
                    continue
                if "betas" in group:
                    for name in MOMENTS:
                        state[name] = torch.zeros_like(parameter.data)
                    if isinstance(inner, torch.optim.Optimizer) and _counts_per_parameter(inner):
                        state[STEP] = torch.zeros((), dtype=torch.float32)
                elif group.get("momentum"):
                    state["momentum_buffer"] = torch.zeros_like(parameter.data)


def _counts_per_parameter(inner: torch.optim.Optimizer) -> bool:
    return type(inner).__module__.startswith("torch.optim")


def steps_done(optimizer: MegatronOptimizer) -> int | None:
    """The number of updates; None where the optimizer does not count them."""
    for part in optimizer_parts(optimizer):
        for state in part.optimizer.state.values():
            if STEP in state:
                return round(float(state[STEP]))
        for group in part.optimizer.param_groups:
            if STEP in group and group["params"]:
                return round(float(group[STEP]))
    return None


def set_steps(optimizer: MegatronOptimizer, steps: int) -> None:
    """Set the number of updates, wherever the optimizer keeps it."""
    for part in optimizer_parts(optimizer):
        inner = part.optimizer
        for state in inner.state.values():
            if STEP in state:
                state[STEP].fill_(steps)
        if not _counts_per_parameter(inner) and "betas" in inner.defaults:
            for group in inner.param_groups:
                group[STEP] = steps


def find_steps(saved: Any) -> int | None:
    """The number of updates in a saved optimizer state of any kind and age."""
    if isinstance(saved, Mapping):
        for name in ("common_step", STEP):
            if name in saved and not isinstance(saved[name], Mapping | list):
                value = saved[name]
                return round(float(value.view() if isinstance(value, StoredTensor) else value))
    children = saved.values() if isinstance(saved, Mapping) else saved if isinstance(saved, list | tuple) else ()
    return next((steps for child in children if (steps := find_steps(child)) is not None), None)


def find_scaler(saved: Any) -> Mapping[str, Any] | None:
    """The state of the loss scaler in a saved optimizer state."""
    if isinstance(saved, Mapping):
        if isinstance(saved.get("grad_scaler"), Mapping):
            return saved["grad_scaler"]
        saved = list(saved.values())
    children = saved if isinstance(saved, list | tuple) else ()
    return next((scaler for child in children if (scaler := find_scaler(child)) is not None), None)


def set_scaler(optimizer: MegatronOptimizer, saved: Mapping[str, Any] | None) -> None:
    """Restore the loss scaler of fp16."""
    for part in optimizer_parts(optimizer):
        scaler = getattr(part, "grad_scaler", None)
        if scaler is not None and saved:
            values = {name: v.view().clone() if isinstance(v, StoredTensor) else v for name, v in saved.items()}
            scaler.load_state_dict(values)


def plain_state(part: MegatronOptimizer) -> dict[str, Any]:
    """What an optimizer's `state_dict` holds, as plain values and tensors that carry nothing else.

    Of a distributed optimizer only what is no tensor of parameters; those are gathered on their own.
    """
    if isinstance(part, DistributedOptimizer) and not parameters(part):
        # A stage without experts: megatron-core looks for the number of steps in vain.
        groups = [{name: value for name, value in g.items() if name != "params"} for g in part.optimizer.param_groups]
        scaler = {"grad_scaler": part.grad_scaler.state_dict()} if part.grad_scaler else {}
        return _detached({"optimizer": {"param_groups": groups}, **scaler})
    return _detached(part.state_dict())


def _detached(value: Any) -> Any:
    """megatron-core marks tensors with attributes, with which torch would save them as objects."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {name: _detached(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_detached(entry) for entry in value)
    return value


def fill_plain(part: MegatronOptimizer, saved: Mapping[str, Any], where: str) -> None:
    """Copy the tensors of a saved state, numbered as `parameters` are, into an optimizer that is not distributed. Steps
    and loss scaler are not touched.

    Raises:
        DamagedCheckpoint: a tensor is missing or has another shape; names it.
    """
    inner = saved.get("optimizer", saved)
    state = inner.get("state") if isinstance(inner, Mapping) else None
    if not isinstance(state, Mapping):
        raise DamagedCheckpoint(f"{where}: the optimizer's state is not there")
    for number, parameter in enumerate(parameters(part)):
        own = {
            name: tensor
            for name, tensor in part.optimizer.state[parameter].items()
            if name in (*MOMENTS, "momentum_buffer")
        }
        for name, tensor in own.items():
            _copy(state.get(number, {}).get(name), tensor, f"{where}: {name} of parameter {number}")
    masters = [tensor for group in getattr(part, "fp32_from_float16_groups", ()) for tensor in group]
    stored = [tensor for group in saved.get(MASTERS, ()) for tensor in group]
    if len(masters) != len(stored):
        raise DamagedCheckpoint(f"{where}: {len(stored)} fp32 parameters, expected {len(masters)}")
    for number, (tensor, value) in enumerate(zip(masters, stored, strict=True)):
        _copy(value, tensor, f"{where}: fp32 parameter {number}")


def _copy(value: Any, target: Tensor, what: str) -> None:
    value = value.view() if isinstance(value, StoredTensor) else value
    if not isinstance(value, Tensor):
        raise DamagedCheckpoint(f"{what} is missing")
    if value.shape != target.shape:
        raise DamagedCheckpoint(f"{what} has shape {list(value.shape)} instead of {list(target.shape)}")
    with torch.no_grad():
        target.copy_(value)


def keep_settings(optimizer: MegatronOptimizer) -> list[list[dict[str, Any]]]:
    """The settings of all groups of parameters, which are this run's and not the checkpoint's."""
    return [
        [
            {name: value for name, value in group.items() if name not in ("params", STEP)}
            for group in part.optimizer.param_groups
        ]
        for part in optimizer_parts(optimizer)
    ]


def put_settings_back(optimizer: MegatronOptimizer, settings: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Undo what loading has done to the settings that `keep_settings` gave."""
    for part, groups in zip(optimizer_parts(optimizer), settings, strict=True):
        for group, kept in zip(part.optimizer.param_groups, groups, strict=True):
            group.update(kept)
