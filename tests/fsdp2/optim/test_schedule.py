"""The learning rate of every step against transformers' schedules."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from mindspeed_llm.fsdp2.config import TrainingConfig
from mindspeed_llm.fsdp2.optim.schedule import build_schedule

PEAK, MINIMUM = 3e-4, 2e-5


def of_transformers(kind: str, warmup: int, total: int) -> list[float]:
    """The rates that an optimizer has in steps 0 to `total`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    if kind == "cosine":
        scheduler = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, total, min_lr=MINIMUM)
    elif kind == "linear":
        scheduler = get_linear_schedule_with_warmup(optimizer, warmup, total)
    else:
        scheduler = get_constant_schedule_with_warmup(optimizer, warmup)
    rates = []
    for _ in range(total + 1):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(
    ("ratio", "total", "warmup"),
    [(0.0, 20, 0), (0.1, 20, 2), (0.03, 33, 0), (0.03, 34, 1), (0.5, 7, 3), (1.0, 5, 5), (0.0, 1, 0)],
)
def test_every_step_equals_transformers(kind: str, ratio: float, total: int, warmup: int) -> None:
    config = TrainingConfig(output_dir="o", lr=PEAK, min_lr=MINIMUM, lr_scheduler_type=kind, warmup_ratio=ratio)
    schedule = build_schedule(config, total)
    assert schedule.warmup_steps == warmup
    expected = of_transformers(kind, warmup, total)
    if warmup == total:
        expected = expected[:-1]  # a run that warms up all the time has no rate after its end
    assert [schedule.at(step) for step in range(len(expected))] == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_values_by_hand() -> None:
    config = TrainingConfig(output_dir="o", lr=1.0, min_lr=0.2, lr_scheduler_type="cosine", warmup_ratio=0.2)
    schedule = build_schedule(config, 10)
    assert [schedule.at(step) for step in (0, 1, 2)] == [0.0, 0.5, 1.0]
    assert schedule.at(6) == pytest.approx(0.6)  # half way: the mean of peak and minimum
    assert schedule.at(4) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    assert [schedule.at(step) for step in (10, 11, 1000)] == pytest.approx([0.2] * 3)


def test_nothing_falls_below_zero_after_the_end() -> None:
    config = TrainingConfig(output_dir="o", lr=1.0, lr_scheduler_type="linear", warmup_ratio=0.0)
    assert build_schedule(config, 10).at(12) == 0.0
