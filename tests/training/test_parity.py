"""Training on the Megatron backend equals a plain transformers loop, step by step, for any topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.pool import RankPool
from tests.support.reference import Trace, assert_parity, make_samples, train_reference
from tests.support.toys import TOYS, save_toy
from tests.training.assembled import hub_weights
from tests.training.rows import GLOBAL_BATCH

pytestmark = pytest.mark.distributed
STEPS = 8
ROW = "tests.training.rows:train"

TP, PP, VPP, EP, ETP = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--num-layers-per-virtual-pipeline-stage",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)
OVERLAPS = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
CHUNKS = ["--use-ascend-coc", "--coc-parallel-num"]
ALLTOALL = ["--moe-token-dispatcher-type", "alltoall"]
# (toy, ranks, flags)
ROWS: list[tuple[str, int, list[str]]] = [
    ("llama", 1, []),
    ("llama", 2, [TP, "2"]),
    ("qwen3", 2, [TP, "2", "--sequence-parallel"]),
    ("llama_tied", 2, [PP, "2"]),
    ("llama", 4, [PP, "4"]),
    ("qwen3", 2, [PP, "2", VPP, "1"]),
    ("llama", 2, []),
    ("qwen3", 2, OVERLAPS),
    ("llama_tied", 4, [TP, "2", PP, "2"]),
    ("qwen3_moe", 1, ["--moe-grouped-gemm"]),
    ("qwen3_moe", 2, [EP, "2", *ALLTOALL]),
    ("qwen3_moe", 4, [EP, "2", TP, "2", ETP, "1", "--sequence-parallel", *ALLTOALL]),
    ("qwen3_moe", 4, [EP, "2", TP, "2", ETP, "2", "--sequence-parallel", "--moe-grouped-gemm", *ALLTOALL]),
    ("mixtral", 4, [PP, "2", EP, "2", "--moe-grouped-gemm"]),
    ("qwen3", 4, [TP, "2", *OVERLAPS]),
    ("llama", 2, [PP, "2", "--num-layer-list", "3,1"]),
    ("qwen3", 1, ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]),
    ("llama", 2, [TP, "2", "--recompute-granularity", "selective"]),
    ("llama", 2, [TP, "2", *CHUNKS, "2"]),
    ("qwen3", 2, [TP, "2", "--sequence-parallel", *CHUNKS, "4", "--recompute-activation-function"]),
    ("qwen3_moe", 4, [EP, "2", TP, "2", ETP, "2", "--sequence-parallel", *CHUNKS, "8", *ALLTOALL]),
    ("llama", 1, ["--micro-batch-size", "1"]),
    ("llama", 1, ["--micro-batch-size", "8"]),
]


class Case:
    """One toy on disk with its samples and the reference's trace."""

    def __init__(self, toy: str, folder: Path) -> None:
        self.folder = str(save_toy(toy, folder))
        self.samples = make_samples(count=STEPS * GLOBAL_BATCH, vocabulary=TOYS[toy]["vocab_size"], no_target_every=5)
        self.reference = train_reference(Path(self.folder), self.samples, steps=STEPS, global_batch=GLOBAL_BATCH)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Cases by toy, made once."""
    made: dict[str, Case] = {}

    def case(toy: str) -> Case:
        if toy not in made:
            made[toy] = Case(toy, tmp_path_factory.mktemp(toy) / "model")
        return made[toy]

    return case


def run(rank_pool: RankPool, case: Case, ranks: int, flags: list[str], **options: Any) -> Trace:
    rows = rank_pool.run(
        ROW, ranks=ranks, folder=case.folder, samples=case.samples, steps=STEPS, flags=flags, **options
    )
    assert all(row["losses"] == rows[0]["losses"] for row in rows)
    weights = in_classes(Path(case.folder), hub_weights(Path(case.folder), rows))
    return Trace(losses=rows[0]["losses"], grad_norms=rows[0]["grad_norms"], weights=weights)


def in_classes(folder: Path, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights under the names of the files, as the parameters of transformers' class (which stacks experts)."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model = type(model).from_pretrained(None, config=model.config, state_dict=weights, dtype=torch.float32)
    return dict(model.state_dict())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("toy", "ranks", "flags"), ROWS, ids=lambda value: value if isinstance(value, str) else None)
def test_equals_transformers(rank_pool: RankPool, cases: Any, toy: str, ranks: int, flags: list[str]) -> None:
    case = cases(toy)
    assert_parity(run(rank_pool, case, ranks, flags), case.reference)


def test_noop_layers_change_nothing(rank_pool: RankPool, cases: Any) -> None:
    case = cases("llama")
    flags = [PP, "2", "--noop-layers", "0,5"]
    assert_parity(run(rank_pool, case, 2, flags), case.reference)


@pytest.mark.parametrize(
    ("mutant", "toy", "ranks", "flags"),
    [
        ("mean_of_means", "llama", 1, []),
        ("padding_in_the_softmax", "llama", 1, []),
        ("norms_not_summed", "qwen3", 2, [TP, "2", "--sequence-parallel"]),
        ("embedding_not_summed", "llama_tied", 2, [PP, "2"]),
        ("no_data_parallel_sum", "llama", 2, []),
        ("batched_messages", "qwen3", 2, [PP, "2", VPP, "1"]),
        ("chunk_after_chunk", "qwen3", 2, [TP, "2", "--sequence-parallel", *CHUNKS, "2"]),
    ],
)
def test_mutants_are_caught(
    rank_pool: RankPool, cases: Any, mutant: str, toy: str, ranks: int, flags: list[str]
) -> None:
    case = cases(toy)
    rows = rank_pool.run(
        ROW, ranks=ranks, folder=case.folder, samples=case.samples, steps=2, flags=flags, mutant=mutant
    )
    for row in rows:
        norms = zip(row["grad_norms"], case.reference.grad_norms, strict=False)
        losses = zip(row["losses"], case.reference.losses, strict=False)
        assert any(abs(mine / theirs - 1) > 1e-4 for mine, theirs in [*norms, *losses])
