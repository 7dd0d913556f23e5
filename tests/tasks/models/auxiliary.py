"""Auxiliary losses of routers by the formulas of their papers, and gradients with them, on transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.tasks.models.families import FAMILIES, build, labels_of, save_gradients, token_ids

COEFFICIENT = 0.7
# Router logits of one layer [samples, S, experts] and what the micro steps before had -> the loss of a micro step.
Loss = Callable[[Tensor, list[Tensor]], Tensor]


def per_micro_step(logits: Tensor, before: list[Tensor]) -> Tensor:
    """Fedus et al. 2022, equations 4 to 6, of all tokens together; 1 for an even load."""
    # transformers leaves out the division by the number of experts of a token.
    return load_balancing_loss_func((logits.flatten(0, 1),), logits.shape[-1], _TOP) / _TOP


def per_sequence(logits: Tensor, before: list[Tensor]) -> Tensor:
    """The mean of the same over the samples."""
    return torch.stack([per_micro_step(sample[None], []) for sample in logits]).mean()


def per_global_batch(logits: Tensor, before: list[Tensor]) -> Tensor:
    """Qiu et al. 2025 (arXiv:2501.11873): the load is that of all tokens of the step so far."""
    load = torch.cat([*before, logits]).flatten(0, 1).topk(_TOP).indices.flatten().bincount(minlength=logits.shape[-1])
    share = load / load.sum()
    return logits.shape[-1] * (share * logits.softmax(-1).mean((0, 1))).sum()


def of_size(logits: Tensor, before: list[Tensor]) -> Tensor:
    """Zoph et al. 2022, equation 5."""
    return logits.logsumexp(-1).square().mean()


_TOP = 2
LOSSES: dict[str, Loss] = {
    "aux_loss": per_micro_step,
    "seq_aux_loss": per_sequence,
    "global_aux_loss": per_global_batch,
    "z_loss": of_size,
}


def save_with(loss: str, name: str, folder: Path, *, micro: int) -> Path:
    """Write the gradients of the mean loss over the samples plus COEFFICIENT times the auxiliary loss of each layer,
    averaged over micro steps of `micro` samples.
    """
    model = build(name)
    experts = FAMILIES[name].get("num_experts") or FAMILIES[name]["num_local_experts"]
    ids = token_ids()
    output = model(ids, output_router_logits=True)
    total = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), labels_of(ids).flatten())
    for of_layer in output.router_logits:
        steps = list(of_layer.view(*ids.shape, experts).split(micro))
        total = total + COEFFICIENT * sum(LOSSES[loss](step, steps[:index]) for index, step in enumerate(steps)) / len(
            steps
        )
    total.backward()
    save_gradients(model, folder)
    return folder
