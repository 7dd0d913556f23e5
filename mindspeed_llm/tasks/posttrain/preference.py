"""What a step of preference optimisation minimises: the mean loss of the pairs of its global batch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from mindspeed_llm.tasks.losses.preference import METRICS, PreferenceOptions, Replies, pair_weights, paired_loss
from mindspeed_llm.tasks.posttrain.reference import Reference
from mindspeed_llm.training.objective import LOSS, Batch, Loss, token_losses

_REFERENCE = "reference"


class Preference:
    """The losses of `tasks.losses.preference` on batches of `pair_batches`, see `training.objective.Objective`.

    The reference's log probabilities are computed before the schedule of the policy begins, by a schedule of their own
    without backward, so that of two models one at a time has activations.
    """

    metrics: tuple[str, ...] = METRICS
    rows_per_sample = 2
    is_likelihood = False

    def __init__(self, args: Namespace, reference: Reference, options: PreferenceOptions) -> None:
        self._args, self._reference, self._options = args, reference, options

    def prepare(self, batches: list[Iterator[Batch]], count: int) -> list[Iterator[Batch]]:
        """See `Objective`: the micro batches of the last stage get the reference's log probabilities, [rows]."""
        held: list[list[Batch]] = [[next(own) for _ in range(count)] for own in batches]
        found = self._reference_log_probs(held)
        if found:
            # Of the chunks of a rank the last one has the output layer.
            held[-1] = [{**batch, _REFERENCE: log_probs} for batch, log_probs in zip(held[-1], found, strict=True)]
        return [iter(own) for own in held]

    def count(self, batch: Batch) -> Tensor:
        """See `Objective`: its pairs."""
        return pair_weights(batch["loss_mask"].sum(dim=-1)).sum()

    def forward_step(self, batches: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Loss]:
        """See `Objective`."""
        batch = next(batches)
        mask, reference, options = batch["loss_mask"], batch.get(_REFERENCE), self._options

        def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            assert reference is not None, "the loss is asked for on the last stage, where `prepare` has put it"
            return pair_losses(mask, reference, losses, options=options)

        return token_losses(batch, model), loss

    def _reference_log_probs(self, held: list[list[Batch]]) -> list[Tensor]:
        """[rows] for each micro batch on the last stage; nothing on the others."""
        chunks = list(self._reference.chunks)
        iterators = [iter(own) for own in held]

        def forward_step(batches: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Any]:
            batch = next(batches)
            mask = batch["loss_mask"]
            return token_losses(batch, model), lambda losses, non_loss_data: replies(mask, losses).log_probs

        with self._reference.ready():
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(chunks) > 1 else iterators[0],
                model=chunks,
                num_microbatches=len(held[0]),
                seq_length=self._args.seq_length,
                micro_batch_size=self._args.micro_batch_size * self.rows_per_sample,
                decoder_seq_length=self._args.seq_length,
                forward_only=True,
                collect_non_loss_data=True,
            )


def replies(loss_mask: Tensor, losses: Tensor) -> Replies:
    """Losses per token [rows, S] -> log probabilities of the targets of each row, and how many there are."""
    # A position without a target may have any loss, also an infinite one: 0 * inf would be NaN.
    return Replies(-torch.where(loss_mask > 0, losses.float(), 0.0).sum(dim=-1), loss_mask.sum(dim=-1))


def pair_losses(
    loss_mask: Tensor, reference: Tensor, losses: Tensor, *, options: PreferenceOptions
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Losses per token of the policy -> the sum of the pairs' losses, the number of pairs, and the report.

    Args:
        loss_mask: [rows, S]; the upper half of the rows are chosen sides, the lower half the rejected ones. A pair
            without a target on either side counts nothing.
        reference: log probabilities of the rows under the reference, [rows].
        losses: negative log likelihoods of labels, [rows, S].
        options: which loss.
    """
    result, weights = paired_loss(replies(loss_mask, losses), reference, options)
    total, count = (result.losses * weights).sum(), weights.sum()
    sums = {LOSS: total.detach(), **result.sums(weights)}
    return total, count.to(torch.int), {name: torch.stack((value, count)) for name, value in sums.items()}
