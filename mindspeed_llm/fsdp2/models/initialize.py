"""Values for what no weight file holds: random weights, and buffers that a module computes for itself.

A model that was built on the meta device has neither. The classes of transformers can compute both in
`_init_weights`; the functions here call it on pieces small enough for host memory, and check that every value was
really written.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from mindspeed_llm.errors import UserError

_INTEGER_SENTINEL = 0x5A


def local_slices(tensor: torch.Tensor) -> tuple[slice, ...]:
    """The slices of the full tensor that this rank holds (everything for a plain tensor; empty slices where it has
    none).
    """
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that lies on this rank, as a plain tensor that shares its memory."""
    data = tensor.detach()
    return data.to_local() if isinstance(data, DTensor) else data


@torch.no_grad()
def initialize_weights(model: PreTrainedModel, *, seed: int) -> None:
    """Draw random weights for every parameter of a model whose parameters may be sharded.

    The draw depends on (seed, name of the module) alone, so that every topology, and a plain or a meta build, starts
    from the same weights. One decoder layer at a time is held whole in host memory.

    Raises:
        UserError: the model's class leaves a parameter without a value.
    """
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    for prefix, unit, owner, recurse in _units(model):
        slots = _parameter_slots(unit, prefix, recurse, skip=tied)
        if not slots:
            continue
        originals = {name: module._parameters[local] for name, module, local in slots}
        for name, module, local in slots:
            shape = originals[name].shape
            module._parameters[local] = nn.Parameter(torch.full(shape, float("nan"), dtype=torch.float32))
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed((seed + zlib.crc32(prefix.encode())) % 2**63)
                with guard_torch_init_functions():
                    for module, module_owner in _post_order(unit, owner) if recurse else [(unit, owner)]:
                        module_owner._init_weights(module)
            values = {name: module._parameters[local].detach() for name, module, local in slots}
        finally:
            for name, module, local in slots:
                module._parameters[local] = originals[name]
        for name, value in values.items():
            if torch.isnan(value).any():
                raise UserError(
                    f"model.train_from_scratch: {type(owner).__name__} gives no initial value for parameter {name}; "
                    "a model of this class can only be trained from weights"
                )
            local_tensor(originals[name]).copy_(value[local_slices(originals[name])])


@torch.no_grad()
def initialize_computed_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that are not part of the weights (rotary frequencies, embedding scales) after `to_empty`.

    Raises:
        UserError: the model's class does not compute one of them; names it.
    """
    computed = []
    for prefix, module, owner in _with_owner(model):
        names = [name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None]
        if not names:
            continue
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = True  # transformers' init functions leave such tensors alone
        for name in names:
            _fill_with_sentinel(module._buffers[name])
            computed.append((f"{prefix}.{name}" if prefix else name, module, name))
        with guard_torch_init_functions():
            owner._init_weights(module)
    stale = [name for name, module, local in computed if _holds_sentinel(module._buffers[local])]
    if stale:
        raise UserError(
            f"model.init_model_with_meta_device: {type(model).__name__} does not recompute the buffers "
            f"{', '.join(stale[:5])} after it was built on the meta device; set it to false for this model"
        )


def _fill_with_sentinel(buffer: torch.Tensor) -> None:
    buffer.fill_(
        float("nan") if buffer.is_floating_point() else True if buffer.dtype == torch.bool else _INTEGER_SENTINEL
    )


def _holds_sentinel(buffer: torch.Tensor) -> bool:
    if buffer.is_floating_point():
        return bool(torch.isnan(buffer).any())
    return bool((buffer == (True if buffer.dtype == torch.bool else _INTEGER_SENTINEL)).all())


def _with_owner(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """(name, module, nearest enclosing PreTrainedModel) of every module; that class knows how to initialise it."""
    owners: dict[str, PreTrainedModel] = {}
    for name, module in model.named_modules():
        parent = owners.get(name.rpartition(".")[0], model)
        owners[name] = module if isinstance(module, PreTrainedModel) else parent
        yield name, module, owners[name]


def _units(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, PreTrainedModel, bool]]:
    """(name, module, owner, whole subtree?): every entry of an outermost ModuleList, and each module outside of
    those.
    """
    inside: list[str] = []
    for name, module, owner in _with_owner(model):
        if any(name.startswith(prefix) for prefix in inside):
            continue
        parent = model.get_submodule(name.rpartition(".")[0]) if name else None
        whole = isinstance(parent, nn.ModuleList)
        if whole:
            inside.append(f"{name}.")
        yield name, module, owner, whole


def _post_order(module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[nn.Module, PreTrainedModel]]:
    for child in module.children():
        yield from _post_order(child, child if isinstance(child, PreTrainedModel) else owner)
    yield module, owner


def _parameter_slots(
    unit: nn.Module, prefix: str, recurse: bool, *, skip: set[str]
) -> list[tuple[str, nn.Module, str]]:
    slots = []
    for name, module in unit.named_modules() if recurse else [("", unit)]:
        path = ".".join(part for part in (prefix, name) if part)
        for local, parameter in module._parameters.items():
            full = f"{path}.{local}" if path else local
            if parameter is not None and full not in skip:
                slots.append((full, module, local))
    return slots
