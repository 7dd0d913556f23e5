"""Which parameters decay, and that both kernels are torch's AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mindspeed_llm.fsdp2.config import TrainingConfig
from mindspeed_llm.fsdp2.optim import optimizer_factory
from mindspeed_llm.fsdp2.optim.optimizer_factory import OptimizerFactory
from mindspeed_llm.platform import device
from tests.support.toys import build_toy

HYPER = {"lr": 1e-3, "adam_beta1": 0.8, "adam_beta2": 0.97, "adam_epsilon": 1e-6, "weight_decay": 0.1}


def config(**fields: Any) -> TrainingConfig:
    return TrainingConfig(output_dir="o", **{**HYPER, **fields})


class WithBias(nn.Module):
    """One matrix, one bias, one norm, a scalar and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.norm = nn.LayerNorm(3)
        self.gate = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)


def decay_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    members = [(names[p], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]]
    assert len(dict(members)) == len(members)  # nothing twice
    return dict(members)


def test_norms_and_biases_do_not_decay() -> None:
    model = WithBias()
    decay = {"linear.weight": 0.1, "linear.bias": 0.0, "norm.weight": 0.0, "norm.bias": 0.0, "gate": 0.0}
    assert decay_by_name(model, OptimizerFactory.create(model, config())) == decay


def test_everything_decays_when_asked_for() -> None:
    model = WithBias()
    found = decay_by_name(model, OptimizerFactory.create(model, config(decay_norm_and_bias=True)))
    assert found == dict.fromkeys(["linear.weight", "linear.bias", "norm.weight", "norm.bias", "gate"], 0.1)


def test_a_tied_model_has_every_parameter_once() -> None:
    model = build_toy("llama_tied")
    found = decay_by_name(model, OptimizerFactory.create(model, config()))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert {name for name, decay in found.items() if decay == 0.0} == {name for name in found if "norm" in name}


@pytest.mark.parametrize("optimizer", ["adamw", "fused_adamw"])
def test_steps_equal_adamw_by_hand(optimizer: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 3, dtype=torch.float64)
    model = nn.Linear(3, 4, bias=False)
    model.weight.data.copy_(weight)
    ours = OptimizerFactory.create(model, config(optimizer=optimizer))
    assert ours.param_groups[0]["fused"] is True  # on the CPU; other devices below
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    expected = model.weight.detach().double()
    for step in range(1, 6):
        gradient = torch.randn(4, 3)
        model.weight.grad = gradient
        ours.step()
        first = 0.8 * first + 0.2 * gradient.double()
        second = 0.97 * second + 0.03 * gradient.double() ** 2
        corrected = (first / (1 - 0.8**step)) / ((second / (1 - 0.97**step)).sqrt() + 1e-6)
        expected = expected - 1e-3 * 0.1 * expected - 1e-3 * corrected
        torch.testing.assert_close(model.weight.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("choice", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_the_implementation_of_each_device_gives_the_same_steps(
    monkeypatch: pytest.MonkeyPatch, choice: dict[str, bool]
) -> None:
    torch.manual_seed(0)
    weight, gradients = torch.randn(7, 5), torch.randn(4, 7, 5)

    def after_steps(implementation: dict[str, bool]) -> torch.Tensor:
        monkeypatch.setattr(optimizer_factory, "adamw_implementation", lambda: implementation)
        model = torch.nn.Linear(5, 7, bias=False)
        with torch.no_grad():
            model.weight.copy_(weight)
        optimizer = OptimizerFactory.create(model, config())
        for gradient in gradients:
            model.weight.grad = gradient.clone()
            optimizer.step()
        return model.weight.detach()

    torch.testing.assert_close(after_steps(choice), after_steps({"foreach": False}), rtol=1e-6, atol=1e-7)


def test_adamw_on_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {}
    for kind in device.DEVICE_TYPES:
        monkeypatch.setattr(device, "device_type", lambda kind=kind: kind)
        chosen[kind] = device.adamw_implementation()
    assert chosen == {"npu": {"foreach": False}, "cuda": {"foreach": True}, "cpu": {"fused": True}}
