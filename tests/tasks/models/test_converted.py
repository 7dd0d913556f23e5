"""Files of `convert_ckpt_v2.py` fit the models of a training run: they load strictly, and compute the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import RankPool
from tests.tasks.checkpoint import toys
from tests.tasks.models.results import assert_parity
from tests.tasks.models.topologies import EP2, ETP1, GROUPED, PP2, SP, TP2, VPP

pytestmark = pytest.mark.distributed
TO_TP2, TO_PP2, TO_EP2 = (f"--target-{kind}-parallel-size 2" for kind in ("tensor", "pipeline", "expert"))
TO_VPP, TO_GROUPED = "--num-layers-per-virtual-pipeline-stage 1", "--moe-grouped-gemm"
ROWS: list[tuple[str, int, str, dict[str, Any]]] = [
    ("llama2", 1, "", {}),
    ("llama2", 2, TO_TP2, TP2),
    ("llama-biases", 2, TO_TP2, TP2 | SP),
    ("llama-tied", 2, TO_PP2, PP2),
    ("llama-tied", 4, f"{TO_TP2} {TO_PP2} {TO_VPP}", TP2 | PP2 | VPP),
    ("qwen25-tied-windows", 2, f"{TO_PP2} {TO_VPP}", PP2 | VPP),
    ("qwen3", 2, f"{TO_PP2} --num-layer-list 1,3", PP2 | {"num_layer_list": (1, 3)}),
    ("mistral", 2, f"{TO_PP2} --noop-layers 0,5", PP2 | {"noop_layers": (0, 5)}),
    ("mixtral", 2, f"{TO_EP2} {TO_GROUPED}", EP2 | GROUPED),
    ("mixtral", 2, TO_EP2, EP2),
    ("qwen3-moe", 4, f"{TO_TP2} {TO_EP2}", TP2 | EP2 | SP),
    ("qwen3-moe", 4, f"{TO_TP2} {TO_EP2} {TO_GROUPED}", TP2 | EP2 | SP | GROUPED),
    (
        "qwen3-moe-steps",
        2,
        f"{TO_TP2} {TO_EP2} --expert-tensor-parallel-size 1",
        TP2 | EP2 | SP | ETP1 | {"moe_token_dispatcher_type": "alltoall"},
    ),
    ("qwen2-moe", 4, f"{TO_PP2} {TO_EP2} {TO_VPP} {TO_GROUPED}", PP2 | EP2 | VPP | GROUPED),
    ("qwen2-moe", 2, TO_TP2, TP2 | SP),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "ranks", "flags", "values"), ROWS, ids=[f"{row[0]} {row[2]}" for row in ROWS])
def test_converted_files_load_strictly_and_compute_the_same(
    rank_pool: RankPool,
    family: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    ranks: int,
    flags: str,
    values: dict[str, Any],
) -> None:
    folder = family(name)
    toys.run(folder, tmp_path / "mcore", *flags.split(), "--make-vocab-size-divisible-by", "4")
    results = rank_pool.run(
        "tests.tasks.models.rows:compare",
        ranks=ranks,
        folder=str(folder),
        checkpoint=str(tmp_path / "mcore"),
        gradients=None,
        **values,
    )
    assert_parity(results)
