"""Models that do not say anything: their logits are no finite numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_llm.errors import UserError

DAMAGED = (
    "the model's logits are not numbers (NaN), or not finite: its weights are damaged, its training failed, or fp16 is "
    "too small for what it computes (--dtype bf16 or fp32 is not)"
)


def refuse_damaged(values: Tensor) -> None:
    """Raise UserError where logits are NaN or infinite; minus infinity, as a probability of 0, is no fault.

    Args:
        values: one of each row of logits: the logarithm of the sum of their exponentials, or their largest logarithm of
            a probability. Whatever is wrong in a row is wrong in these.
    """
    if not torch.isfinite(values).all():
        raise UserError(DAMAGED)
