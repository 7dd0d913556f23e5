"""Random numbers of dropout: the same when activations are computed again, and where ranks share activations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import RankPool
from tests.tasks.models.topologies import PP2, SP, TP2, VPP

pytestmark = pytest.mark.distributed
ROW = "tests.tasks.models.rows:with_dropout"
Family = Callable[[str], Path]
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("recompute", [UNIFORM, SELECTIVE])
@pytest.mark.parametrize(("ranks", "values"), [(1, {}), (2, TP2), (2, TP2 | SP), (2, PP2 | VPP)])
@pytest.mark.parametrize("flash", [False, True])
def test_what_is_computed_again_is_dropped_again(
    rank_pool: RankPool,
    family: Family,
    ranks: int,
    values: dict[str, Any],
    recompute: dict[str, Any],
    flash: bool,
) -> None:
    settings = values | {"use_flash_attn": flash}
    folder = str(family("qwen3"))
    plain = rank_pool.run(ROW, ranks=ranks, folder=folder, **settings)
    again = rank_pool.run(ROW, ranks=ranks, folder=folder, **settings, **recompute)
    for one, other in zip(plain, again, strict=True):
        assert one["losses"] == other["losses"]
        assert one["gradients"] == other["gradients"]
    undropped = rank_pool.run(ROW, ranks=ranks, folder=folder, **settings, hidden_dropout=0.0, attention_dropout=0.0)
    assert plain[-1]["losses"] and undropped[-1]["losses"] != plain[-1]["losses"]


@pytest.mark.parametrize("values", [TP2, TP2 | SP])
def test_hidden_states_are_dropped_alike_where_ranks_share_them(
    rank_pool: RankPool, family: Family, values: dict[str, Any]
) -> None:
    first, second = rank_pool.run(ROW, ranks=2, folder=str(family("qwen3")), **values)
    # The loss is computed from the hidden states of all ranks: it would differ if each had dropped its own.
    assert first["losses"] == second["losses"]
    # Heads are not shared: the same mask for those of both ranks would be a mask of half the randomness.
    assert first["attention"] != second["attention"]
