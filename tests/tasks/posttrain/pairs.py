"""Preference pairs on disk, and preference optimisation of them by a few lines of torch on transformers' model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mindspeed_llm.tasks.preprocess.indexed_format import IndexedWriter
from tests.core.lora.reference import RECIPE as LORA_RECIPE
from tests.core.lora.reference import load, of_peft, with_peft
from tests.support.reference import RECIPE, Sample, Trace

Pair = tuple[Sample, Sample]
"""(chosen, rejected)."""
BETA = 0.2
FIRST_OF_SHARDS = (0, 256)
"""The first token of each of the two parts that a vocabulary of 512 is cut into."""
REWARDS = ("rewards_chosen", "rewards_rejected", "rewards_accuracy", "rewards_margin")


def make_pairs(count: int) -> list[Pair]:
    """Two replies of different lengths to one prompt; each has the first token of each shard as a target.

    Token 0 is the last one: transformers takes it for padding, and its row of the embedding gets no gradient there.
    """
    generator = torch.Generator().manual_seed(0)

    def numbers(shortest: int, longest: int) -> list[int]:
        length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        return torch.randint(3, 509, (length,), generator=generator).tolist()

    pairs = []
    for _ in range(count):
        prompt = numbers(3, 8)
        replies = [[*numbers(2, 6), FIRST_OF_SHARDS[1], *numbers(1, 6), FIRST_OF_SHARDS[0]] for _ in range(2)]
        chosen, rejected = [(prompt + reply, [-100] * len(prompt) + reply) for reply in replies]
        pairs.append((chosen, rejected))
    return pairs


def write_pairs(prefix: Path, pairs: list[Pair]) -> Path:
    """The files that `preprocess_data.py` makes of pairs."""
    for number, side in enumerate(("chosen", "rejected")):
        for part, key in enumerate(("input_ids", "labels")):
            with IndexedWriter(f"{prefix}_packed_{side}_{key}_document") as writer:
                for pair in pairs:
                    writer.add(np.array(pair[number][part], dtype=np.int32))
    return prefix


def save_near(folder: Path, to: Path) -> Path:
    """A Hugging Face directory with the weights of another one, each moved a little."""
    generator = torch.Generator().manual_seed(3)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.004)
    model.save_pretrained(to)
    return to


def train_reference(
    folder: Path,
    pairs: list[Pair],
    *,
    steps: int,
    kind: str,
    smoothing: float,
    ftx: float,
    ref_model: Path,
    adapter: Path | None,
) -> tuple[Trace, list[dict[str, float]]]:
    """Pair by pair, without padding: the trace, and the rewards of each step."""
    reference = load(ref_model)
    recipe = LORA_RECIPE if adapter else RECIPE
    policy: Any = with_peft(folder, adapter) if adapter else load(folder)
    trained = of_peft(policy) if adapter else dict(policy.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": recipe["weight_decay"]},
            {"params": [p for p in trained.values() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=recipe["lr"],
        betas=recipe["betas"],
        eps=recipe["eps"],
    )
    size = len(pairs) // steps
    trace, rewards = Trace(), []
    for step in range(steps):
        total, sums = 0.0, torch.zeros(4)
        for chosen, rejected in pairs[step * size : (step + 1) * size]:
            own = [log_probs(policy, side) for side in (chosen, rejected)]
            with torch.no_grad():
                frozen = [log_probs(reference, side).sum() for side in (chosen, rejected)]
            c, r = (mine.sum() - fixed for mine, fixed in zip(own, frozen, strict=True))
            if kind == "ipo":
                c, r = c / len(own[0]), r / len(own[1])
            margin = c - r
            if kind == "sigmoid":
                loss = -(1 - smoothing) * torch.log(1 / (1 + torch.exp(-BETA * margin)))
                loss = loss - smoothing * torch.log(1 / (1 + torch.exp(BETA * margin)))
            elif kind == "hinge":
                loss = (1 - BETA * margin).clamp(min=0)
            else:
                loss = (margin - 1 / (2 * BETA)) ** 2
            loss = (loss - ftx * own[0].mean()) / size
            loss.backward()
            total += loss.item()
            sums += torch.tensor([BETA * c.item(), BETA * r.item(), float(margin > 0), BETA * margin.item()]) / size
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), recipe["clip"])
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(total)
        trace.grad_norms.append(norm.item())
        rewards.append(dict(zip(REWARDS, sums.tolist(), strict=True)))
    state = trained if adapter else policy.state_dict()
    trace.weights = {name: tensor.detach().clone() for name, tensor in state.items()}
    return trace, rewards


def log_probs(model: Any, sample: Sample) -> Tensor:
    """Of each target."""
    ids, labels = sample
    found = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
    return torch.stack([found[t, label] for t, label in enumerate(labels[1:]) if label != -100])
