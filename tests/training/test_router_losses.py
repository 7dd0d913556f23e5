"""Auxiliary losses of routers weigh their coefficient, however many positions of a step have a target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.pool import RankPool
from tests.support.toys import TOYS, save_toy
from tests.tasks.models.auxiliary import of_size, per_micro_step
from tests.training.rows import GLOBAL_BATCH, LENGTH, Sample, batch_of

pytestmark = pytest.mark.distributed
TOY, MICRO = "qwen3_moe", 2
AUX, Z = 0.3, 0.02
FLAGS = (
    f"--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff {AUX} --moe-z-loss-coeff {Z} --clip-grad 1e9 "
    f"--micro-batch-size {MICRO}"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(TOY, tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Only the last fifth of each has targets. Full rows; no token 0, for which transformers has no gradient."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, TOYS[TOY]["vocab_size"], (GLOBAL_BATCH, LENGTH), generator=generator).tolist()
    first = LENGTH * 4 // 5
    return [(row, [-100] * first + row[first:]) for row in ids]


def norm_of_gradients(folder: Path, samples: list[Sample], *, aux: float, z: float) -> float:
    """Of transformers' model: the mean loss per target of all samples, and of each layer the mean of its auxiliary
    losses over micro steps.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    batch = batch_of(samples)
    output = model(batch["tokens"], output_router_logits=True, use_cache=False)
    losses = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    total = (losses * batch["loss_mask"].flatten()).sum() / batch["loss_mask"].sum()
    for of_layer in output.router_logits:
        steps = of_layer.view(*batch["tokens"].shape, -1).split(MICRO)
        for loss, coefficient in ((per_micro_step, aux), (of_size, z)):
            total = total + coefficient * torch.stack([loss(step, []) for step in steps]).mean()
    total.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm())


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, ""),
        (2, "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --moe-token-dispatcher-type alltoall"),
        (
            2,
            "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
        ),
    ],
)
def test_with_few_targets(rank_pool: RankPool, folder: Path, samples: list[Sample], ranks: int, flags: str) -> None:
    expected = norm_of_gradients(folder, samples, aux=AUX, z=Z)
    # What the losses weigh decides the norm.
    assert abs(expected / norm_of_gradients(folder, samples, aux=AUX / 2, z=Z / 2) - 1) > 1e-2
    assert run(rank_pool, folder, samples, ranks, flags) == [[pytest.approx(expected, rel=1e-5)]] * ranks


def test_the_weight_by_tokens_would_be_wrong(rank_pool: RankPool, folder: Path, samples: list[Sample]) -> None:
    expected = norm_of_gradients(folder, samples, aux=AUX, z=Z)
    [[found]] = run(rank_pool, folder, samples, 1, "", mutant="router_losses_by_tokens")
    assert abs(found / expected - 1) > 1e-2


def run(
    pool: RankPool, folder: Path, samples: list[Sample], ranks: int, flags: str, mutant: str | None = None
) -> list[list[float]]:
    """The norms of the first step on each rank."""
    rows = pool.run(
        "tests.training.rows:train",
        ranks=ranks,
        folder=str(folder),
        samples=samples,
        steps=1,
        flags=[*FLAGS, *flags.split()],
        values={"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": AUX},
        mutant=mutant,
    )
    return [row["grad_norms"] for row in rows]
