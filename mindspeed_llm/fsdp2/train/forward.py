"""One micro batch through the model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.losses.cross_entropy import cross_entropy_sum

Batch = Mapping[str, Any]
"""One micro batch of one rank: `input_ids` [batch, sequence], `labels` [batch, sequence] already shifted,
`attention_mask` and `position_ids` [batch, sequence] or None, `num_samples` and `num_tokens` ints."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchLoss:
    """`nll_sum`: sum over the targets, or for pairs the sum of their losses, fp32, with its graph. `aux_loss`: the
    router's loss of this micro batch, or None. `metrics`: further sums over the same, without a graph.
    """

    nll_sum: torch.Tensor
    aux_loss: torch.Tensor | None
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


def model_inputs(batch: Batch, device: torch.device, *, with_aux_loss: bool = False) -> dict[str, Any]:
    """What a model is called with for `batch`."""
    inputs: dict[str, Any] = {}
    for name in ("input_ids", "attention_mask", "position_ids"):
        if batch.get(name) is not None:
            inputs[name] = batch[name].to(device, non_blocking=True)
    if with_aux_loss:
        inputs["output_router_logits"] = True
    return inputs


def forward_loss(
    model: PreTrainedModel, batch: Batch, *, device: torch.device, with_aux_loss: bool = False
) -> MicroBatchLoss:
    """Run `batch` and sum the cross entropy of its targets."""
    output = model(**model_inputs(batch, device, with_aux_loss=with_aux_loss), use_cache=False)
    labels = batch["labels"].to(device, non_blocking=True)
    aux_loss = output.aux_loss if with_aux_loss else None
    return MicroBatchLoss(nll_sum=cross_entropy_sum(output.logits, labels), aux_loss=aux_loss)


def check_model_takes(model: PreTrainedModel, *, segments: bool, aux_loss: bool) -> None:
    """Refuse settings that the model's class would ignore.

    Args:
        segments: several independent texts share a row (`neat_packing`, `reset_attention_mask`).
        aux_loss: `router_aux_loss_coef` is above 0.

    Raises:
        UserError: with what the class lacks.
    """
    parameters = inspect.signature(model.forward).parameters
    name = type(model).__name__
    if segments:
        field = "data.neat_packing / data.reset_attention_mask"
        if "position_ids" not in parameters:
            raise UserError(f"{field}: {name} takes no position_ids, so it cannot keep the texts of a row apart")
        layers = getattr(model.config.get_text_config(), "layer_types", None) or ()
        recurrent = sorted({layer for layer in layers if "attention" not in layer or "linear" in layer})
        if recurrent or getattr(model, "_is_stateful", False):
            raise UserError(
                f"{field}: {name} has layers ({', '.join(recurrent) or 'state space'}) that carry state from one text "
                "of a row to the next; train it unpacked"
            )
    if aux_loss and "output_router_logits" not in parameters:
        raise UserError(f"training.router_aux_loss_coef is above 0, but {name} has no router loss; set it to 0")
