"""One optimizer step: router losses, packed rows, fp16 scaling and clipping, against loops over transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.pool import RankPool
from tests.support.reference import RECIPE, Trace, assert_parity, collate, make_samples, relative, train_reference
from tests.support.toys import save_toy

pytestmark = pytest.mark.distributed
ROW = "tests.fsdp2.train.rows:steps"
Samples = list[tuple[list[int], list[int]]]
COEFFICIENT = 0.5


def trace_of(row: dict[str, Any]) -> Trace:
    return Trace(
        losses=[result["loss"] for result in row["results"]],
        grad_norms=[result["grad_norm"] for result in row["results"]],
        weights=row["weights"][-1],
    )


# --- Router losses


def router_reference(folder: Path, plan: list[list[list[Samples]]]) -> tuple[Trace, list[float]]:
    """transformers' own loss of every micro batch, its router loss added with the coefficient."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": RECIPE["weight_decay"]},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=RECIPE["lr"],
        betas=RECIPE["betas"],
        eps=RECIPE["eps"],
    )
    trace, aux_losses = Trace(), []
    for of_ranks in plan:
        micro = [samples for of_rank in of_ranks for samples in of_rank]
        batches = [collate(samples) for samples in micro if samples]
        targets = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
        nll = aux = 0.0
        for batch, count in zip(batches, targets, strict=True):
            model.router_aux_loss_coef = 0.0
            output = model(**batch, use_cache=False, output_router_logits=True)
            share = output.loss * (count / sum(targets))
            (share + COEFFICIENT * output.aux_loss / len(micro)).backward()
            nll += share.item()
            aux += output.aux_loss.item() / len(micro)
        trace.losses.append(nll)
        trace.grad_norms.append(torch.nn.utils.clip_grad_norm_(parameters, RECIPE["clip"]).item())
        optimizer.step()
        optimizer.zero_grad()
        aux_losses.append(aux)
    trace.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return trace, aux_losses


def deal(samples: Samples, *, steps: int, ranks: int, accumulation: int, micro: int) -> list[list[list[Samples]]]:
    """plan[step][rank] = micro batches; samples are dealt in turn, what is missing at the end stays empty."""
    rest = iter(range(0, len(samples), micro))
    return [
        [[samples[i : i + micro] if (i := next(rest, len(samples))) < len(samples) else [] for _ in range(accumulation)]
         for _ in range(ranks)]
        for _ in range(steps)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("toy", "ranks", "accumulation", "recompute", "grouped"),
    [
        ("qwen3_moe", 1, 1, False, False),
        ("qwen3_moe", 1, 2, True, False),
        ("qwen3_moe", 2, 2, False, True),
        ("mixtral", 1, 2, False, False),
        ("mixtral", 2, 1, True, False),
    ],
)
def test_router_losses_equal_those_of_transformers(
    rank_pool: RankPool, tmp_path: Path, toy: str, ranks: int, accumulation: int, recompute: bool, grouped: bool
) -> None:
    folder = save_toy(toy, tmp_path / "model")
    plan = deal(make_samples(count=24, vocabulary=509), steps=3, ranks=ranks, accumulation=accumulation, micro=2)
    expected, aux = router_reference(folder, plan)
    sections = {
        "training": {"router_aux_loss_coef": COEFFICIENT},
        "parallel": {"recompute": recompute},
        "optimization": {"moe_grouped_gemm": grouped},
    }
    row = rank_pool.run(ROW, ranks=ranks, folder=str(folder), plan=plan, sections=sections)[0]
    assert [result["aux_loss"] for result in row["results"]] == pytest.approx(aux, rel=1e-5)
    assert_parity(trace_of(row), expected)


def test_without_a_coefficient_no_router_loss_is_computed(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = save_toy("qwen3_moe", tmp_path / "model")
    samples = make_samples(count=8, vocabulary=509)
    row = rank_pool.run(ROW, ranks=1, folder=str(folder), plan=[[[samples]]], sections={})[0]
    assert row["results"][0]["aux_loss"] is None
    assert_parity(trace_of(row), train_reference(folder, samples, steps=1, global_batch=8))


@pytest.mark.parametrize("mutant", [None, "fillers_teach_the_router", "router_sees_padding"])
def test_rows_that_fill_up_do_not_teach_the_router(rank_pool: RankPool, tmp_path: Path, mutant: str | None) -> None:
    folder = save_toy("qwen3_moe", tmp_path / "model")
    plan = deal(make_samples(count=6, vocabulary=509), steps=1, ranks=2, accumulation=2, micro=2)
    assert plan[0][1][1] == []
    expected, _ = router_reference(folder, plan)
    sections = {"training": {"router_aux_loss_coef": COEFFICIENT}}
    row = rank_pool.run(ROW, ranks=2, folder=str(folder), plan=plan, sections=sections, mutant=mutant)[0]
    if mutant is None:
        assert_parity(trace_of(row), expected)
        chosen = [sample for of_rank in plan[0] for samples in of_rank for sample in samples]
        targets = sum(label != -100 for _, labels in chosen for label in labels[1:])
        assert (row["results"][0]["samples"], row["results"][0]["targets"]) == (6, targets)
    else:
        with pytest.raises(AssertionError, match=r"instead of|relative difference"):
            assert_parity(trace_of(row), expected)


# --- Packed rows


@pytest.mark.parametrize(
    ("toy", "flash", "mutant"),
    [
        ("llama", False, None),
        ("llama", True, None),
        ("gemma3_text", True, None),
        ("qwen3_moe", False, None),
        ("llama", True, "segments_see_each_other"),
    ],
)
def test_a_packed_row_trains_as_its_samples_alone(
    rank_pool: RankPool, tmp_path: Path, toy: str, flash: bool, mutant: str | None
) -> None:
    folder = save_toy(toy, tmp_path / "model")
    samples = make_samples(count=16, vocabulary=509)
    reference = train_reference(folder, samples, steps=2, global_batch=8, one_by_one=True)
    plan = [[[samples[i : i + 5], samples[i + 5 : i + 8]]] for i in (0, 8)]
    sections = {"optimization": {"use_flash_attn": flash}}
    row = rank_pool.run(ROW, ranks=1, folder=str(folder), plan=plan, sections=sections, as_packed=True, mutant=mutant)[
        0
    ]
    if mutant is None:
        assert_parity(trace_of(row), reference)
    else:
        with pytest.raises(AssertionError, match="instead of"):
            assert_parity(trace_of(row), reference)


# --- Clipping and scaling


def test_max_grad_norm_0_does_not_clip(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = save_toy("llama", tmp_path / "model")
    samples = make_samples(count=16, vocabulary=509)
    plan = [[[samples[:8]]], [[samples[8:]]]]
    # Adam's first step does not see the length of a gradient; a large epsilon makes it count.
    options = {"adam_epsilon": 0.1, "max_grad_norm": 0.0}
    unclipped = train_reference(folder, samples, steps=2, global_batch=8, clip=math.inf, eps=0.1)
    row = rank_pool.run(ROW, ranks=1, folder=str(folder), plan=plan, sections={"training": options})[0]
    assert unclipped.grad_norms[0] > 1.5
    assert_parity(trace_of(row), unclipped)
    clipped = rank_pool.run(
        ROW, ranks=1, folder=str(folder), plan=plan, sections={"training": {**options, "max_grad_norm": 1.0}}
    )[0]
    assert_parity(trace_of(clipped), train_reference(folder, samples, steps=2, global_batch=8, eps=0.1))
    with pytest.raises(AssertionError):
        assert_parity(trace_of(clipped), unclipped)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_fp16_overflow_skips_the_step_and_halves_the_scale(rank_pool: RankPool, tmp_path: Path, ranks: int) -> None:
    folder = save_toy("llama", tmp_path / "model")
    samples = make_samples(count=8, vocabulary=509)
    per_rank = 8 // ranks
    one_step = [[samples[rank * per_rank : (rank + 1) * per_rank]] for rank in range(ranks)]
    count = 10
    row = rank_pool.run(
        ROW,
        ranks=ranks,
        folder=str(folder),
        plan=[one_step] * count,
        sections={"parallel": {"param_dtype": "fp16"}},
        scale=2.0**22,
    )[0]
    updated = [result["updated"] for result in row["results"]]
    skipped = updated.index(True)
    assert 0 < skipped < count - 2 and updated == [False] * skipped + [True] * (count - skipped)
    assert row["scales"] == [2.0 ** (22 - min(i, skipped)) for i in range(1, count + 1)]
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, tensor in source.items():
        assert torch.equal(row["weights"][skipped - 1][name], tensor)  # no decay, no momentum either
        assert not torch.equal(row["weights"][skipped][name], tensor)
    # The first steps that count are those of fp32, but for the rounding of fp16.
    reference = train_reference(folder, samples * 2, steps=2, global_batch=8)
    for mine, theirs in zip(row["results"][skipped:], reference.losses, strict=False):
        assert relative(mine["loss"], theirs) < 5e-3
    for mine, theirs in zip(row["results"][skipped:], reference.grad_norms, strict=False):
        assert relative(mine["grad_norm"], theirs) < 2e-2
