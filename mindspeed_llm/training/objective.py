"""What a model is trained for: the forward pass of a micro batch and its loss.

`TrainStep` and `TrainLoop` know nothing of it but this interface, so that tasks share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
Loss = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""Output of the last stage -> (sum whose gradient is taken, number that the whole step's sum is divided by, report).

The second is an int tensor. The report has for `LOSS` and for each of the objective's `metrics` a tensor [2], a sum and
a number to divide it by; it is detached. Sums and numbers are added up over micro batches and data-parallel ranks.
"""
LOSS = "lm loss"


class Objective(Protocol):
    """What a step minimises."""

    metrics: tuple[str, ...]
    """Names of what is reported besides `LOSS`; metrics.jsonl and the log line have the means."""
    rows_per_sample: int
    """Rows of a batch for each sample: 2 where a sample is a pair."""
    is_likelihood: bool
    """Whether the loss is a mean negative log likelihood per target, of which exp(loss) is the perplexity."""

    def prepare(self, batches: list[Iterator[Batch]], count: int) -> list[Iterator[Batch]]:
        """What `forward_step` takes its micro batches from: `batches`, or the next `count` of each with more in them.

        Args:
            batches: for each chunk of this rank an iterator over the same micro batches.
            count: micro batches of the step, or of the evaluation; all ranks call this at the same place.
        """
        ...

    def count(self, batch: Batch) -> Tensor:
        """What a micro batch adds to the number that the step's sum is divided by (the second value of its `Loss`)."""
        ...

    def forward_step(self, batches: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Loss]:
        """Take the next micro batch; the output of this stage, and what makes the loss of it on the last one."""
        ...


class NextToken:
    """Cross entropy of the next token at each position that has a target."""

    metrics: tuple[str, ...] = ()
    rows_per_sample = 1
    is_likelihood = True

    def prepare(self, batches: list[Iterator[Batch]], count: int) -> list[Iterator[Batch]]:
        """See `Objective`."""
        return batches

    def count(self, batch: Batch) -> Tensor:
        """See `Objective`: its targets."""
        return batch["loss_mask"].sum()

    def forward_step(self, batches: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Loss]:
        """See `Objective`; batches are those of `training.data.batches`."""
        batch = next(batches)
        return token_losses(batch, model), partial(token_loss, batch["loss_mask"])


def token_losses(batch: Batch, model: nn.Module) -> Tensor:
    """The output of this stage for a micro batch: of the last one the losses per token [rows, S]."""
    return model(
        batch["tokens"],
        batch["position_ids"],
        batch.get("documents"),
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )


def token_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Losses per token [B, S] -> their sum over targets, the number of targets, and both for the report.

    A micro batch without targets gives 0 and 0.
    """
    # A position without a target may have any loss, also an infinite one: 0 * inf would be NaN.
    total = torch.where(loss_mask > 0, losses.float() * loss_mask, 0.0).sum()
    count = loss_mask.sum()
    return total, count.to(torch.int), {LOSS: torch.stack((total.detach(), count.to(total.dtype)))}
