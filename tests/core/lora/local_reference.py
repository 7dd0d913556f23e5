"""The authority for local updates: Oja's rule in a few lines of torch, on what hooks see in transformers' model.

Nothing of the package is used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.core.lora.reference import RECIPE, Added
from tests.support.reference import Trace
from tests.training.rows import GLOBAL_BATCH, Sample, batch_of

TRAIN_ITERS = 8
"""Of `tests.training.rows`; the rate falls to 0 in so many steps."""
FALLING = ["--lr-decay-style", "linear", "--min-lr", "0"]


def train(model: Added, samples: Sequence[Sample], *, final_layer: int, rate: float, ratio: float, steps: int) -> Trace:
    """Train adapters up to layer `final_layer` by Oja's rule, the others by AdamW on their gradients alone."""
    shared: dict[int, list[str]] = {}
    for module, (a, _) in model.halves.items():
        shared.setdefault(id(a), []).append(module)
    local = [modules for modules in shared.values() if int(modules[0].split(".")[2]) <= final_layer]
    inputs: dict[str, Tensor] = {}

    def keeping(name: str) -> Any:
        return lambda module, arguments: inputs.update({name: arguments[0].detach()})

    for first, *others in local:
        for name in (first, *others):
            for half in model.halves[name]:
                half.requires_grad_(False)
        model.model.get_submodule(first).register_forward_pre_hook(keeping(first))
    trained = {name: parameter for name, parameter in model.trained().items() if parameter.requires_grad}
    groups = [
        {"params": [parameter for name, parameter in trained.items() if half in name], "times": times}
        for half, times in ((".lora_A.", 1.0), (".lora_B.", ratio))
    ]
    recipe = {name: RECIPE[name] for name in ("lr", "betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(groups, **recipe)
    trace = Trace()
    for step in range(steps):
        falling = 1 - step / TRAIN_ITERS
        batch = batch_of(list(samples[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]))
        # Without a mask for rows' ends: what fills rows up is computed like other tokens.
        logits = model(input_ids=batch["tokens"]).logits
        losses = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        loss = losses @ batch["loss_mask"].flatten() / batch["loss_mask"].sum()
        loss.backward()
        trace.grad_norms.append(float(nn.utils.clip_grad_norm_(list(trained.values()), RECIPE["clip"])))
        trace.losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = RECIPE["lr"] * falling * group["times"]
        optimizer.step()
        optimizer.zero_grad()
        for modules in local:
            a, bs = model.halves[modules[0]][0], [model.halves[module][1] for module in modules]
            _oja(inputs[modules[0]], a, bs, rate_of_a=rate * falling, rate_of_b=rate * ratio * falling)
    trace.weights = {name: parameter.detach().clone() for name, parameter in model.trained().items()}
    return trace


@torch.no_grad()
def _oja(x: Tensor, a: Tensor, bs: Sequence[Tensor], *, rate_of_a: float, rate_of_b: float) -> None:
    x, b = x.flatten(0, -2).double(), torch.cat(list(bs)).double()
    y = x @ a.double().T
    z = y @ b.T
    a += rate_of_a * (y.T @ x - y.T @ y @ a.double()) / len(x)
    b += rate_of_b * (z.T @ y - z.T @ z @ b) / len(x)
    for part, values in zip(bs, b.split([len(part) for part in bs]), strict=True):
        part.copy_(values)
