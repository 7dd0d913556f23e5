"""Token-weighted cross entropy.

The number that a run reports, and the gradient it follows, is the mean over every target token of the global batch:
sums are taken here, and divided once by the count of targets over all micro batches and ranks. A mean per micro batch
would give a target in a short answer more weight than one in a long answer, and the weight would depend on how the
batch was split.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100
"""Label of a position without a target (the value that torch's and transformers' losses skip)."""


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the negative log likelihoods of all targets, in fp32.

    Args:
        logits: [..., vocabulary], any floating dtype.
        labels: [...], already shifted: `labels[t]` is the target of position t; `IGNORE_INDEX` where there is none.

    Returns:
        A scalar; exactly 0 (with a zero gradient, not NaN) when no position has a target.
    """
    return F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        labels.reshape(-1),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )


def count_targets(labels: torch.Tensor) -> torch.Tensor:
    """Number of positions of `labels` that have a target, as an int64 scalar."""
    return (labels != IGNORE_INDEX).sum()


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Align labels with the logits that predict them: position t gets the label of position t + 1, the last one none.

    Args:
        labels: [..., sequence], one label per input token (the convention of data sets and of transformers).
    """
    shifted = torch.full_like(labels, IGNORE_INDEX)
    shifted[..., :-1] = labels[..., 1:]
    return shifted
