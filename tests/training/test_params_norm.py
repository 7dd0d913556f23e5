"""`--log-params-norm` counts each weight once, whatever the ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.pool import RankPool
from tests.support.toys import save_toy

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("toy", "ranks", "flags"),
    [
        ("llama_tied", 1, ""),
        ("qwen3", 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("llama_tied", 2, "--pipeline-model-parallel-size 2"),
        ("qwen3", 2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        (
            "qwen3_moe",
            4,
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
            "--sequence-parallel --moe-token-dispatcher-type alltoall",
        ),
        ("mixtral", 4, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --moe-grouped-gemm"),
    ],
)
def test_equals_the_norm_of_the_files(rank_pool: RankPool, tmp_path: Path, toy: str, ranks: int, flags: str) -> None:
    folder = save_toy(toy, tmp_path / "model")
    weights = [value for path in folder.glob("*.safetensors") for value in load_file(path).values()]
    expected = math.sqrt(sum(float(value.double().square().sum()) for value in weights))
    found = rank_pool.run("tests.training.rows:norm_of_weights", ranks=ranks, folder=str(folder), flags=flags.split())
    # Rows that pad the vocabulary are zero.
    assert found == [pytest.approx(expected, rel=1e-6)] * ranks
