"""Which of a checkpoint's optimizer state a run takes over."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mindspeed_llm.fsdp2.checkpoint.train_state import make_optimizer_tensors, optimizer_tensors


def trained(model: nn.Module, *, steps: int) -> torch.optim.AdamW:
    """AdamW on what needs a gradient, as the run has it."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_moments_of_what_is_frozen_now_are_left_behind() -> None:
    """Guards against a second checkpoint with the first one's moments, which a third run would take for current."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    stored: dict[str, Any] = optimizer_tensors(model, trained(model, steps=3))
    assert {name.rpartition(".")[0] for name in stored} == {f"optimizer.{n}" for n, _ in model.named_parameters()}
    model[0].requires_grad_(False)
    optimizer = trained(model, steps=0)
    make_optimizer_tensors(model, optimizer, stored)
    kept = {name for name in stored if name.startswith("optimizer.1.")}
    assert optimizer_tensors(model, optimizer).keys() == kept
    assert set(optimizer.state) == set(model[1].parameters())
