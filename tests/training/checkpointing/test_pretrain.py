"""`pretrain_gpt.py` as a whole: interrupted, gone on from with the same command, and with other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import RankPool
from tests.support.runs import eval_losses, metrics

pytestmark = pytest.mark.distributed
ROW = "tests.training.checkpointing.rows:pretrain"
FLAGS = (
    "--train-iters 6 --global-batch-size 4 --log-interval 1 --eval-interval 2 --eval-iters 1 --lr-decay-style cosine "
    "--hidden-dropout 0 --attention-dropout 0 --save-interval 2"
)


def run(pool: RankPool, ranks: int, save: Path, flags: str = "") -> list[dict[str, Any]]:
    return pool.run(ROW, ranks=ranks, flags=f"{FLAGS} --save {save} --load {save} {flags}")


@pytest.mark.parametrize("kind", ["torch", "torch_dist"])
def test_the_same_command_goes_on(rank_pool: RankPool, tmp_path: Path, kind: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(rank_pool, 2, whole, f"--ckpt-format {kind}")
    first = run(rank_pool, 2, parts, f"--ckpt-format {kind} --exit-interval 3")
    assert [rank["code"] for rank in first] == [0, 0]
    # The last of its own interval, and the one at which the run was stopped.
    assert sorted(path.name for path in parts.glob("iter_*")) == ["iter_0000002", "iter_0000003"]
    second = run(rank_pool, 2, parts, f"--ckpt-format {kind}")
    assert any("iter_0000003 after step 3 (12 samples)" in line for line in second[0]["log"])
    assert metrics(parts) == metrics(whole) and len(metrics(whole)) == 6
    assert eval_losses(parts) == eval_losses(whole) and len(eval_losses(whole)) == 3
    assert sorted(path.name for path in parts.glob("iter_*")) == [f"iter_000000{step}" for step in (2, 3, 4, 6)]
    # Nothing is left to do.
    third = run(rank_pool, 2, parts, f"--ckpt-format {kind}")
    assert [rank["code"] for rank in third] == [0, 0]


def test_the_data_go_on_when_ranks_change(rank_pool: RankPool, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(rank_pool, 1, whole)
    run(rank_pool, 4, parts, "--exit-interval 2 --use-distributed-optimizer")
    run(rank_pool, 2, parts, "--exit-interval 4 --pipeline-model-parallel-size 2")
    run(rank_pool, 2, parts)
    found, expected = metrics(parts), metrics(whole)
    assert len(found) == len(expected) == 6
    for left, right in zip(found, expected, strict=True):
        assert left["consumed_samples"] == right["consumed_samples"]
        assert left["lm_loss"] == pytest.approx(right["lm_loss"], rel=1e-6)
    assert [step for step, _ in eval_losses(parts)] == [step for step, _ in eval_losses(whole)]
    for (_, left), (_, right) in zip(eval_losses(parts), eval_losses(whole), strict=True):
        assert left == pytest.approx(right, rel=1e-6)
