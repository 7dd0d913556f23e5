"""A model without its adapters computes what it did before it had any, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.core.lora import reference
from tests.core.lora.reference import ALPHA, RANK
from tests.core.lora.test_parity import ALLTOALL, EP, FUSED, PARTS, SP, TP
from tests.support.pool import RankPool
from tests.support.toys import save_toy

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("toy", "ranks", "targets", "flags"),
    [
        ("llama", 2, PARTS, [TP, "2", SP]),
        ("qwen3_moe", 2, FUSED, [EP, "2", "--moe-grouped-gemm", *ALLTOALL]),
    ],
)
def test_without_adapters(
    rank_pool: RankPool, tmp_path: Path, toy: str, ranks: int, targets: list[str], flags: list[str]
) -> None:
    model = save_toy(toy, tmp_path / "model")
    adapter = reference.make_adapter(model, tmp_path / "adapter", targets)
    lora = ["--lora-target-modules", *targets, "--lora-r", str(RANK), "--lora-alpha", str(ALPHA)]
    lora += ["--lora-load", str(adapter)]
    words = [*flags, "--load", str(model)]
    rows = rank_pool.run("tests.core.lora.rows:logits", ranks=ranks, folder=str(model), flags=words, lora=lora)
    for found in rows:
        assert torch.equal(found["without"], found["model"])
        assert torch.equal(found["again"], found["adapted"])
        assert not torch.allclose(found["adapted"], found["model"], atol=0.1)
