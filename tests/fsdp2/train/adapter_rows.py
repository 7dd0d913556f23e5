"""Rows of the tests of adapters, and an adapter made by PEFT."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from mindspeed_llm.fsdp2.checkpoint import adapter_export
from mindspeed_llm.fsdp2.models.initialize import local_tensor
from mindspeed_llm.fsdp2.train import trainer
from tests.distributed import runs

PROBE = torch.arange(3, 19).reshape(2, 8)


def peft_adapter(model: Path, folder: Path, *, targets: list[str], rank: int = 4, alpha: int = 6, **saving: Any) -> str:
    """An adapter of PEFT's own for `model`, saved by PEFT (with `saving`), both halves random."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder, **saving)
    return str(folder)


def train(*, argv: list[str], mutant: str | None = None) -> dict[str, Any]:
    """Run the command; beside what `runs.train` returns: "logits" of `PROBE` as the run's model computes them before
    its export, and how many numbers this rank holds of gradients when the optimizer steps ("gradients") and of the
    optimizer's state ("state").
    """
    seen: dict[str, Any] = {}

    class Probe(trainer.Trainer):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.optimizer.register_step_pre_hook(self.count_gradients)

        def count_gradients(self, *_: Any) -> None:
            gradients = [p.grad for p in self.built.model.parameters() if p.grad is not None]
            seen["gradients"] = sum(local_tensor(gradient).numel() for gradient in gradients)

        def export(self, folder: Path | None = None) -> None:
            model = self.built.model
            model.eval()
            with torch.no_grad():
                seen["logits"] = model(input_ids=PROBE, use_cache=False).logits
            kept = [value for state in self.optimizer.state.values() for value in state.values()]
            seen["state"] = sum(local_tensor(value).numel() for value in kept if value.ndim)  # all but step counts
            super().export(folder)

    with mock.patch.object(trainer, "Trainer", Probe), MUTANTS[mutant]() if mutant else contextlib.nullcontext():
        return runs.train(argv=argv) | seen


@contextlib.contextmanager
def merged_without_scale() -> Iterator[None]:
    """A fault: alpha / rank is left out of the merged weights."""
    original = adapter_export._product
    with mock.patch.object(adapter_export, "_product", lambda a, b, scale: original(a, b, 1.0)):
        yield


@contextlib.contextmanager
def merged_upside_down() -> Iterator[None]:
    """A fault: what is added to a weight has its rows in the wrong order."""
    original = adapter_export._product
    with mock.patch.object(adapter_export, "_product", lambda *of: lambda: original(*of)().flip(0)):
        yield


MUTANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    function.__name__: function for function in (merged_without_scale, merged_upside_down)
}
