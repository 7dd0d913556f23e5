"""Loss on held-out data."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from mindspeed_llm.fsdp2.train.forward import Batch, forward_loss
from mindspeed_llm.tasks.losses.cross_entropy import count_targets


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """`loss`: mean over all targets of all ranks, in nats. `tokens`: their number. `seconds`: of wall clock."""

    loss: float
    tokens: int
    seconds: float


@torch.no_grad()
def evaluate(model: PreTrainedModel, batches: Iterable[Batch], *, device: torch.device) -> EvalResult:
    """Token-weighted loss over `batches`; every rank must bring the same number of them (rows without targets fill up).

    The model is put into evaluation mode and back.
    """
    started = time.monotonic()
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        total[0] += forward_loss(model, batch, device=device).nll_sum.double().cpu()
        total[1] += count_targets(batch["labels"])
    model.train(was_training)
    # CPU tensors: the group has gloo beside the device's backend, and devices without float64 would round the sum.
    dist.all_reduce(total)
    tokens = int(total[1].item())
    loss = total[0].item() / tokens if tokens else float("nan")
    return EvalResult(loss=loss, tokens=tokens, seconds=time.monotonic() - started)
