"""The tensors of a training run by name, as a checkpoint holds them: `model.<name>` and `optimizer.<name>.<moment>`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.adapter_names import is_adapter

MODEL = "model"
OPTIMIZER = "optimizer"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; of tied ones the first name only. Of a model with adapters these
    alone: the rest stands in the files that it was started from.
    """
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    adapters = {name: tensor for name, tensor in state.items() if is_adapter(name)}
    return {f"{MODEL}.{name}": tensor for name, tensor in (adapters or state).items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's moments and step count of every parameter that has been updated."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{OPTIMIZER}.{name}.{key}"] = value
    return tensors


def make_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, entries: Mapping[str, TensorStorageMetadata]
) -> None:
    """Give each parameter that is trained and that the checkpoint has state for empty moments in its own sharding, for
    a load to fill. State of what is frozen now is left behind: trained again later, it begins anew.
    """
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or f"{OPTIMIZER}.{name}.{_MOMENTS[0]}" not in entries:
            continue  # one without state never had a gradient
        step_device = parameter.device if fused else torch.device("cpu")
        optimizer.state[parameter] = {
            _STEP: torch.zeros((), dtype=torch.float32, device=step_device),
            **{moment: torch.zeros_like(parameter, requires_grad=False) for moment in _MOMENTS},
        }


def check_entries(
    wanted: Mapping[str, torch.Tensor], entries: Mapping[str, TensorStorageMetadata], *, source: str, advice: str
) -> None:
    """Compare names and shapes before anything is read. `source` begins an error's text, `advice` ends it.

    Raises:
        UserError: a tensor of the run that the checkpoint lacks, one of the checkpoint's model tensors that the run
            lacks, or a shape that differs.
    """
    missing = sorted(wanted.keys() - entries.keys())
    left_over = sorted(name for name in entries.keys() - wanted.keys() if name.startswith(f"{MODEL}."))
    if missing or left_over:
        parts = [f"{len(missing)} tensors are not in it ({', '.join(missing[:3])})"] if missing else []
        parts += [f"{len(left_over)} of its tensors have no place ({', '.join(left_over[:3])})"] if left_over else []
        raise UserError(f"{source} belongs to another model: {'; '.join(parts)}; {advice}")
    for name, tensor in wanted.items():
        if tuple(entries[name].size) != tuple(tensor.shape):
            raise UserError(
                f"{source} belongs to another model: {name} has shape {list(entries[name].size)} instead of "
                f"{list(tensor.shape)}; {advice}"
            )
