"""The switches for the device's kernels: they reach their operators, and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import RankPool
from tests.tasks.models.results import assert_parity
from tests.tasks.models.topologies import ALLTOALL, EP2, GROUPED, PP2, SP, TP2, VPP

pytestmark = pytest.mark.distributed
Family = Callable[[str], Path]
SWITCHES = {
    "use_flash_attn": "attention",
    "use_fused_rmsnorm": "rms_norm",
    "use_fused_swiglu": "swiglu",
    "use_fused_rotary_pos_emb": "rotate",
}
"""Argument -> operator of `platform`."""
ALL = dict.fromkeys(SWITCHES, True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("name", ["llama-yarn", "mistral", "qwen2-moe"])
def test_each_switch_reaches_its_operator_alone(rank_pool: RankPool, family: Family, switch: str, name: str) -> None:
    row = "tests.tasks.models.rows:switched"
    [found] = rank_pool.run(row, ranks=1, folder=str(family(name)), switches={switch: True})
    assert {operator for operator, calls in found["calls"].items() if calls} == {SWITCHES[switch]}
    # The kernels of a CPU are the same operations in the same order; but for attention, which has another order, see
    # `test_attention`.
    bar = 2e-5 if switch == "use_flash_attn" else 0.0
    assert found["logits"] <= bar
    assert found["gradients"] <= bar


@pytest.mark.parametrize(
    ("name", "ranks", "values"),
    [
        ("llama-yarn", 2, TP2 | SP),
        ("llama-biases", 2, TP2),
        ("qwen25-tied-windows", 2, PP2 | VPP),
        ("qwen3", 1, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        ("mixtral", 2, EP2 | GROUPED),
        ("qwen2-moe", 2, EP2 | ALLTOALL | {"moe_shared_expert_overlap": True}),
        ("qwen2-moe", 2, TP2 | SP | GROUPED),
    ],
)
def test_all_switches_together_equal_transformers(
    rank_pool: RankPool, family: Family, name: str, ranks: int, values: dict[str, Any]
) -> None:
    row = "tests.tasks.models.rows:compare"
    assert_parity(rank_pool.run(row, ranks=ranks, folder=str(family(name)), **ALL, **values))
