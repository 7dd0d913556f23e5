"""Loss on held-out data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from mindspeed_llm.fsdp2.train.forward import Batch, forward_loss
from mindspeed_llm.fsdp2.train.preference import PairLoss
from mindspeed_llm.tasks.losses.cross_entropy import count_targets
from mindspeed_llm.tasks.losses.preference import METRICS


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """`loss`: mean over all targets of all ranks, in nats, or over all pairs. `tokens`: the number of targets.
    `seconds`: of wall clock. `metrics`: further means over pairs.
    """

    loss: float
    tokens: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, batches: Iterable[Batch], *, device: torch.device, pairs: PairLoss | None = None
) -> EvalResult:
    """Token-weighted loss over `batches`, or the mean of `pairs`; every rank must bring the same number of them (rows
    without targets fill up).

    The model is put into evaluation mode and back.
    """
    started = time.monotonic()
    was_training = model.training
    model.eval()
    # The loss, what it is a mean over, target tokens, metrics of pairs.
    total = torch.zeros(3 + (len(METRICS) if pairs else 0), dtype=torch.float64)
    for batch in batches:
        result = (pairs.forward if pairs else forward_loss)(model, batch, device=device)
        targets = count_targets(batch["labels"])
        total[0] += result.nll_sum.double().cpu()
        total[1] += pairs.count(batch) if pairs else targets
        total[2] += targets
        if pairs:
            total[3:] += torch.stack([result.metrics[name] for name in METRICS]).double().cpu()
    model.train(was_training)
    # CPU tensors: the group has gloo beside the device's backend, and devices without float64 would round the sum.
    dist.all_reduce(total)
    loss_sum, count, tokens, *of_pairs = total.tolist()
    mean = [value / count if count else float("nan") for value in (loss_sum, *of_pairs)]
    return EvalResult(
        loss=mean[0],
        tokens=int(tokens),
        seconds=time.monotonic() - started,
        metrics=dict(zip(METRICS, mean[1:], strict=False)),
    )
