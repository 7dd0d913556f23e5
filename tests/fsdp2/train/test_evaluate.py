"""The evaluation loss against transformers' own loss, sample by sample."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.pool import RankPool
from tests.support.reference import collate, make_samples, relative
from tests.support.toys import save_toy

pytestmark = pytest.mark.distributed
ROW = "tests.fsdp2.train.rows:eval_loss"
SAMPLES = make_samples(count=5, vocabulary=509, shortest=8, longest=64, seed=4)


def with_dropout(folder: Path) -> Path:
    """A toy whose attention drops half of its weights in training."""
    save_toy("llama", folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"attention_dropout": 0.0', '"attention_dropout": 0.5'))
    return folder


def of_transformers(folder: Path) -> tuple[float, int]:
    """Mean over all targets of the losses that transformers gives for each sample alone, and their number."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, targets = 0.0, 0
    with torch.no_grad():
        for sample in SAMPLES:
            count = sum(label != -100 for label in sample[1][1:])
            total += model(**collate([sample])).loss.item() * count
            targets += count
    return total / targets, targets


@pytest.mark.parametrize(
    ("ranks", "batches"),
    [
        (1, [[SAMPLES[:2], SAMPLES[2:4], SAMPLES[4:]]]),
        (1, [[SAMPLES]]),
        # The second rank has one batch less to do: rows without targets fill up.
        (2, [[SAMPLES[:2], SAMPLES[4:]], [SAMPLES[2:4], []]]),
    ],
)
def test_the_loss_equals_transformers(rank_pool: RankPool, tmp_path: Path, ranks: int, batches: list) -> None:
    folder = with_dropout(tmp_path / "model")
    loss, targets = of_transformers(folder)
    rows = rank_pool.run(
        ROW, ranks=ranks, folder=str(folder), batches=batches, sections={"parallel": {"recompute": True}}
    )
    for row in rows:
        assert row["loss"] == rows[0]["loss"]
        assert relative(row["loss"], loss) < 1e-5
        assert row["tokens"] == targets
        assert row["training"]  # back in training mode
        assert row["gradients"] == []


def test_a_mean_of_batch_means_is_another_number(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = with_dropout(tmp_path / "model")
    row = rank_pool.run(
        ROW,
        ranks=1,
        folder=str(folder),
        batches=[[SAMPLES[:2], SAMPLES[2:4], SAMPLES[4:]]],
        sections={},
        mutant="eval_mean_of_means",
    )[0]
    assert relative(row["loss"], of_transformers(folder)[0]) > 1e-3


def test_no_target_at_all_gives_nan_and_not_zero(rank_pool: RankPool, tmp_path: Path) -> None:
    """A loss of 0 would look like a perfect model."""
    folder = with_dropout(tmp_path / "model")
    row = rank_pool.run(ROW, ranks=1, folder=str(folder), batches=[[[]]], sections={})[0]
    assert math.isnan(row["loss"]) and row["tokens"] == 0
