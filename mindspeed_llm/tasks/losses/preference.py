"""Offline losses on preference pairs: DPO (sigmoid, with label smoothing), hinge, IPO.

All of them compare how much more likely the policy makes the chosen reply than the reference does with how much more
likely it makes the rejected one. With log probabilities of whole replies, c for chosen and r for rejected:

    h = (policy_c - policy_r) - (reference_c - reference_r)

    sigmoid   -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)    Rafailov et al. 2023; s: Mitchell 2023 (cDPO)
    hinge     max(0, 1 - beta h)                                       Zhao et al. 2023 (SLiC)
    ipo       (h - 1 / (2 beta))^2, with means per token in h          Azar et al. 2023

A loss is one number per pair, and what a run reports is the mean over the pairs of the global batch: sums are taken
here, and divided once by the number of pairs over all micro batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from mindspeed_llm.tasks.losses.cross_entropy import IGNORE_INDEX

PreferenceLossType = Literal["sigmoid", "hinge", "ipo"]
LOSS_TYPES: tuple[PreferenceLossType, ...] = ("sigmoid", "hinge", "ipo")


class Replies(NamedTuple):
    """Log probabilities of replies, and how many tokens each sums over; both [pairs]."""

    log_probs: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    """What the loss is: its type, beta, label smoothing s (sigmoid only) and the weight of the SFT term."""

    loss_type: PreferenceLossType = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    pref_ftx: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for values that define no loss; the message begins with the name of the option."""
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type {self.loss_type!r} is unknown; expected one of {', '.join(LOSS_TYPES)}")
        if not self.beta > 0:
            raise ValueError(f"beta {self.beta:g} is not above 0")
        if not 0 <= self.label_smoothing < 0.5:
            # At 0.5 both replies would be right, and above it the rejected one.
            raise ValueError(f"label_smoothing {self.label_smoothing:g} is not from 0 to below 0.5")
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ValueError(f"label_smoothing {self.label_smoothing:g} belongs to sigmoid, not to {self.loss_type}")
        if not self.pref_ftx >= 0:
            raise ValueError(f"pref_ftx {self.pref_ftx:g} is below 0")


class PreferenceLoss(NamedTuple):
    """One number for each pair, all [pairs].

    `losses` have their graph; the others have none. `rewards_*` are beta times the policy's log probability less the
    reference's (for ipo, of means per token), `margins` chosen less rejected, `accuracies` 1 where the margin is above
    0 and 0 else: a tie is not a win.
    """

    losses: torch.Tensor
    rewards_chosen: torch.Tensor
    rewards_rejected: torch.Tensor
    margins: torch.Tensor
    accuracies: torch.Tensor

    def sums(self, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        """Weighted sums over the pairs of what a run reports beside the loss, by the names of metrics.jsonl."""
        return {
            "rewards_chosen": (self.rewards_chosen * weights).sum(),
            "rewards_rejected": (self.rewards_rejected * weights).sum(),
            "rewards_accuracy": (self.accuracies * weights).sum(),
            "rewards_margin": (self.margins * weights).sum(),
        }


METRICS = ("rewards_chosen", "rewards_rejected", "rewards_accuracy", "rewards_margin")
"""The names of `PreferenceLoss.sums`, in their order."""


def reply_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> Replies:
    """Log probability of the targets of each row, summed in fp32.

    Args:
        logits: [rows, sequence, vocabulary], any floating dtype.
        labels: [rows, sequence], already shifted; `IGNORE_INDEX` where there is no target. 0 is a token as any other.
    """
    nll = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        labels.reshape(-1),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    return Replies(-nll.view(labels.shape).sum(dim=-1), (labels != IGNORE_INDEX).sum(dim=-1))


def pair_weights(lengths: torch.Tensor) -> torch.Tensor:
    """Which pairs count: 1 for each that has a target on both sides, else 0; [pairs], fp32.

    Args:
        lengths: targets of each row, [2 pairs]; the chosen sides come first, then the rejected ones in the same order.
    """
    chosen, rejected = (lengths > 0).chunk(2)
    return (chosen & rejected).to(torch.float32)


def paired_loss(
    policy: Replies, reference: torch.Tensor, options: PreferenceOptions
) -> tuple[PreferenceLoss, torch.Tensor]:
    """The loss of each pair, and its weight, of rows in the order of `pair_weights`.

    Args:
        policy: replies [2 pairs] of the model that is trained.
        reference: log probabilities [2 pairs] of the same rows under the reference.
        options: which loss.
    """
    (chosen, rejected), (chosen_lengths, rejected_lengths) = policy.log_probs.chunk(2), policy.lengths.chunk(2)
    reference_chosen, reference_rejected = reference.chunk(2)
    loss = preference_loss(
        policy_chosen=Replies(chosen, chosen_lengths),
        policy_rejected=Replies(rejected, rejected_lengths),
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
        options=options,
    )
    return loss, pair_weights(policy.lengths)


def preference_loss(
    *,
    policy_chosen: Replies,
    policy_rejected: Replies,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    options: PreferenceOptions,
) -> PreferenceLoss:
    """The loss of each pair.

    With `options.pref_ftx` the mean negative log likelihood per token of the chosen reply is added, times that factor.

    Args:
        policy_chosen: of the model that is trained; the lengths are the reference's, too. A reply without a token
            counts as one of length 1.
        policy_rejected: of the same model.
        reference_chosen: log probabilities [pairs] under the reference, sums over the same tokens.
        reference_rejected: as `reference_chosen`.
        options: which loss.
    """
    beta = options.beta
    # Means where the loss is on means, else the sums: a length of 1.
    is_mean = options.loss_type == "ipo"
    chosen_length = policy_chosen.lengths.clamp(min=1)
    divide_chosen = chosen_length if is_mean else 1
    divide_rejected = policy_rejected.lengths.clamp(min=1) if is_mean else 1
    chosen = (policy_chosen.log_probs - reference_chosen.detach()) / divide_chosen
    rejected = (policy_rejected.log_probs - reference_rejected.detach()) / divide_rejected
    difference = chosen - rejected
    if options.loss_type == "sigmoid":
        smoothing = options.label_smoothing
        losses = -(1 - smoothing) * F.logsigmoid(beta * difference) - smoothing * F.logsigmoid(-beta * difference)
    elif options.loss_type == "hinge":
        losses = F.relu(1 - beta * difference)
    else:
        losses = (difference - 1 / (2 * beta)).square()
    if options.pref_ftx:
        losses = losses - options.pref_ftx * policy_chosen.log_probs / chosen_length
    margins = (beta * difference).detach()
    return PreferenceLoss(
        losses=losses,
        rewards_chosen=(beta * chosen).detach(),
        rewards_rejected=(beta * rejected).detach(),
        margins=margins,
        accuracies=(margins > 0).to(margins.dtype),
    )
