"""megatron-core's distributed checkpoints of our models can be loaded on any other topology."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import RankPool
from tests.tasks.models.topologies import ALLTOALL, EP2, ETP1, GROUPED, PP2, SP, TP2, VPP

pytestmark = pytest.mark.distributed
NOOPS = {"noop_layers": (0, 5)}
ROWS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("llama-tied", 2, TP2, PP2),
    ("llama-tied", 2, PP2 | VPP, TP2 | SP),
    ("llama-biases", 4, TP2 | PP2, {}),
    ("qwen3", 2, {}, TP2 | {"padded_vocab_size": 640}),
    ("qwen3", 2, PP2 | NOOPS, PP2 | {"num_layer_list": (3, 1)}),
    ("qwen25", 2, PP2 | VPP, PP2 | VPP | {"noop_layers": (1, 2)}),
    ("mixtral", 2, EP2 | GROUPED, TP2 | SP),
    ("mixtral", 2, TP2 | SP, EP2 | GROUPED),
    ("qwen3-moe", 4, EP2 | TP2 | SP | GROUPED, PP2 | EP2),
    ("qwen3-moe-steps", 2, EP2, PP2 | VPP | GROUPED),
    ("qwen2-moe", 4, EP2 | TP2 | SP | ETP1 | ALLTOALL, EP2 | PP2 | GROUPED | NOOPS),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "ranks", "saved", "loaded"), ROWS)
def test_checkpoints_are_read_on_another_topology(
    rank_pool: RankPool,
    family: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    ranks: int,
    saved: dict[str, Any],
    loaded: dict[str, Any],
) -> None:
    results = rank_pool.run(
        "tests.tasks.models.rows:reshard",
        ranks=ranks,
        folder=str(family(name)),
        checkpoint=str(tmp_path / "checkpoint"),
        saved=saved,
        loaded_with=loaded,
    )
    for wrong, right in results:
        assert wrong == [] and right > 0
