"""The authority of the parity tests: a plain loop over transformers and torch in one process, in fp32.

Nothing of the package is used here. One function makes the samples, one trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

# Adam divides each gradient by its own size, so that one of 1e-8, which is mere rounding of fp32, moves a weight as far
# as any other: with torch's epsilon correct code misses 1e-5 on some processors. Gradients here are about 1e-3.
RECIPE = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.01, "clip": 1.0}


Sample = tuple[list[int], list[int]]
"""(ids, labels per input token with -100 where there is no target)."""


@dataclass(kw_only=True)
class Trace:
    """Losses and gradient norms per step, and the weights after the last one."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def make_samples(
    *, count: int, vocabulary: int, seed: int = 0, shortest: int = 32, longest: int = 64, no_target_every: int = 0
) -> list[tuple[list[int], list[int]]]:
    """Ragged samples: (input ids, labels per input token with -100 on a prompt of random length).

    With `no_target_every` n, each n-th sample has no target at all.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        prompt = int(torch.randint(1, length - 2, (1,), generator=generator))
        ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        labels = [-100] * prompt + ids[prompt:]
        if no_target_every and i % no_target_every == 0:
            labels = [-100] * length
        samples.append((ids, labels))
    return samples


def collate(samples: list[tuple[list[int], list[int]]], *, pad: int = 0) -> dict[str, torch.Tensor]:
    """Right-padded `input_ids`, `labels` (not shifted) and `attention_mask`, each [batch, longest]."""
    longest = max(len(ids) for ids, _ in samples)
    rows = [
        (ids + [pad] * (longest - len(ids)), labels + [-100] * (longest - len(ids)), [1] * len(ids))
        for ids, labels in samples
    ]
    return {
        "input_ids": torch.tensor([ids for ids, _, _ in rows]),
        "labels": torch.tensor([labels for _, labels, _ in rows]),
        "attention_mask": torch.tensor([mask + [0] * (longest - len(mask)) for _, _, mask in rows]),
    }


def train_reference(
    folder: Path,
    samples: list[tuple[list[int], list[int]]],
    *,
    steps: int,
    global_batch: int,
    one_by_one: bool = False,
    sizes: Sequence[int] | None = None,
    **options: Any,
) -> Trace:
    """Train a Hugging Face directory with AdamW; `one_by_one` runs each sample alone, without any padding.

    The loss is the sum over all targets of the global batch divided by their number. Parameters of one dimension do not
    decay. `sizes` are the samples of each step where these are not `global_batch`.
    """
    recipe = {**RECIPE, **options}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    model.train()
    model.config.use_cache = False
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": recipe["weight_decay"]},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=recipe["lr"],
        betas=recipe["betas"],
        eps=recipe["eps"],
    )
    trace = Trace()
    for step in range(steps):
        chosen = samples[step * global_batch : (step + 1) * global_batch]
        if sizes is not None:
            chosen = samples[sum(sizes[:step]) : sum(sizes[: step + 1])]
        batches = [collate([sample]) for sample in chosen] if one_by_one else [collate(chosen)]
        targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            nll = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
            )
            (nll / targets).backward()
            total += nll.item()
        norm = torch.nn.utils.clip_grad_norm_(parameters, recipe["clip"])
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(total / targets)
        trace.grad_norms.append(norm.item())
    trace.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return trace


def relative(found: float, expected: float) -> float:
    """|found - expected| / |expected|."""
    return abs(found - expected) / abs(expected)


def assert_parity(
    found: Trace, expected: Trace, *, loss: float = 1e-5, grad_norm: float = 1e-5, weights: float = 1e-5
) -> None:
    """Per step: loss and gradient norm; at the end each weight (norm of the difference / norm of the reference)."""
    assert len(found.losses) == len(expected.losses)
    for step, (mine, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert relative(mine, theirs) < loss, f"step {step}: loss {mine} instead of {theirs}"
    for step, (mine, theirs) in enumerate(zip(found.grad_norms, expected.grad_norms, strict=True)):
        assert relative(mine, theirs) < grad_norm, f"step {step}: grad norm {mine} instead of {theirs}"
    assert found.weights.keys() == expected.weights.keys()
    for name, theirs in expected.weights.items():
        difference = (found.weights[name] - theirs).norm() / theirs.norm()
        assert difference < weights, f"{name}: relative difference {difference:.2e}"
