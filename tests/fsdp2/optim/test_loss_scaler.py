"""The scale of the fp16 loss against torch's own scaler."""

from __future__ import annotations

import random

import pytest
import torch

from mindspeed_llm.fsdp2.optim.loss_scaler import LossScaler


def of_torch(overflows: list[bool], interval: int) -> tuple[list[float], list[bool]]:
    """The scale before every step, and whether the step was taken, of `torch.amp.GradScaler`."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    scales, taken = [], []
    for overflow in overflows:
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
        before = parameter.item()
        scaler.scale((parameter * 1.0).sum()).backward()
        if overflow:
            parameter.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        taken.append(parameter.item() != before)
    return scales, taken


@pytest.mark.parametrize("seed", range(3))
def test_the_scale_follows_torch(seed: int) -> None:
    chance = random.Random(seed)
    overflows = [chance.random() < 0.25 for _ in range(60)]
    scales, taken = of_torch(overflows, interval=3)
    assert taken == [not overflow for overflow in overflows]
    scaler = LossScaler(enabled=True, growth_interval=3)
    found = []
    for overflow in overflows:
        found.append(scaler.factor)
        scaler.update(overflow=overflow)
    assert found == scales
    assert len(set(scales)) > 3  # the sequence moves the scale up and down


def test_the_constants_are_those_of_torch() -> None:
    theirs = torch.amp.GradScaler("cpu")
    ours = LossScaler(enabled=True)
    assert (ours.scale, ours.growth_interval) == (theirs.get_scale(), theirs.get_growth_interval())


def test_where_scaling_is_off_nothing_moves() -> None:
    scaler = LossScaler(enabled=False, growth_interval=1)
    for overflow in (False, True, False):
        scaler.update(overflow=overflow)
        assert scaler.factor == 1.0
