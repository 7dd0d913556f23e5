"""What the tests of loading ask a backend, in this process or on ranks of the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from mindspeed_llm.fsdp2.models.initialize import local_tensor
from mindspeed_llm.tasks.inference.adapters.hf import HFBackend
from mindspeed_llm.tasks.inference.adapters.hf_load import load_hf
from mindspeed_llm.tasks.inference.backend import Batch

TEXTS = ([5, 4, 11, 7, 3, 9, 8], [6, 3, 12, 10, 4])


def ask(backend: HFBackend) -> torch.Tensor:
    """The logits after each token of `TEXTS` but the first two, [8, vocabulary]: a prefill and steps of one token."""
    cache = backend.new_cache(2, 8)
    first, second = TEXTS
    rows = torch.tensor([first[:4], [*second[:3], 0]])
    wanted = [(0, 2), (0, 3), (1, 2)]
    logits = [backend.forward(Batch(tokens=rows, widths=[4, 3], slots=[0, 1], starts=[0, 0], wanted=wanted), cache)]
    for step in range(2):
        rows = torch.tensor([[first[4 + step]], [second[3 + step]]])
        batch = Batch(tokens=rows, widths=[1, 1], slots=[0, 1], starts=[4 + step, 3 + step], wanted=[(0, 0), (1, 0)])
        logits.append(backend.forward(batch, cache))
    last = torch.tensor([[first[6]]])
    logits.append(backend.forward(Batch(tokens=last, widths=[1], slots=[0], starts=[6], wanted=[(0, 0)]), cache))
    return torch.cat(logits)


@torch.no_grad()
def expected(model: nn.Module) -> torch.Tensor:
    """The same from whole texts."""
    first, second = (model.eval()(input_ids=torch.tensor([text]), use_cache=False).logits[0] for text in TEXTS)
    pairs = [(first, 2), (first, 3), (second, 2), (first, 4), (second, 3), (first, 5), (second, 4), (first, 6)]
    return torch.stack([logits[position] for logits, position in pairs]).float()


def load(*, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case has the arguments of `load_hf`."""
    found = []
    for case in cases:
        backend, tokenizer = load_hf(**case)
        parameters = list(backend.model.parameters())
        held = sum(local_tensor(parameter).numel() for parameter in parameters)
        found.append(
            {
                "logits": ask(backend),
                "tokenizer": Path(tokenizer),
                "replica": (backend.replica, backend.replicas, backend.is_first_of_replica),
                "held": held,
                "whole": sum(parameter.numel() for parameter in parameters),
                "types": {local_tensor(parameter).dtype for parameter in parameters},
            }
        )
    return found
