"""Adapters on the Megatron backend equal peft's, or a few lines of torch, step by step and for any topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.core.lora import reference
from tests.core.lora.assembled import hub_adapter
from tests.core.lora.reference import ALPHA, RANK
from tests.support.pool import RankPool
from tests.support.reference import Trace, assert_parity, make_samples
from tests.support.toys import VOCABULARY, save_toy

pytestmark = pytest.mark.distributed
STEPS = 2
ROW = "tests.core.lora.rows:train"

TP, PP, EP, ETP = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)
SP = "--sequence-parallel"
ALLTOALL = ["--moe-token-dispatcher-type", "alltoall"]
FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
OVERLAPS = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
PARTS = ["linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1_gate", "linear_fc1_up", "linear_fc2"]
FUSED = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
# Of each expert both tensor parallel ranks have a part; or each rank has experts of its own.
CUT_EXPERTS = [TP, "2", SP, ETP, "2", *ALLTOALL]
WHOLE_EXPERTS = [TP, "2", SP, ETP, "1", EP, "2", *ALLTOALL]
# (toy, ranks, targets, flags); the first ones are part of each run of CI, with each 14th of the others.
ALWAYS: list[tuple[str, int, list[str], list[str]]] = [
    ("qwen3_moe", 2, PARTS, CUT_EXPERTS),
    ("qwen3_moe", 2, PARTS, WHOLE_EXPERTS),
    ("llama", 2, FUSED, [TP, "2"]),
    ("qwen3_moe", 2, FUSED, [EP, "2", "--moe-grouped-gemm", *ALLTOALL]),
    ("llama_tied", 2, PARTS, [PP, "2", *FULL]),
]
SOMETIMES: list[tuple[str, int, list[str], list[str]]] = [
    ("llama", 2, PARTS, [TP, "2", SP]),
    ("llama", 1, PARTS, []),
    ("llama", 1, FUSED, []),
    ("llama", 2, PARTS, [TP, "2"]),
    ("llama", 2, FUSED, [TP, "2", SP]),
    *[("llama", 1, [part], []) for part in PARTS],
    *[("llama", 2, [part], [TP, "2", SP]) for part in PARTS],
    ("qwen3", 2, ["linear_q", "linear_v"], [TP, "2"]),
    ("qwen3", 2, PARTS, OVERLAPS),
    ("qwen3", 4, FUSED, [TP, "2", SP, PP, "2", "--num-layers-per-virtual-pipeline-stage", "1"]),
    ("llama", 2, PARTS, [TP, "2", SP, *FULL]),
    ("llama", 2, FUSED, [TP, "2", SP, "--use-ascend-coc", "--coc-parallel-num", "2"]),
    ("llama", 2, FUSED, [PP, "2", "--noop-layers", "0,1,2,3"]),
    ("qwen3_moe", 1, PARTS, []),
    ("qwen3_moe", 1, FUSED, ["--moe-grouped-gemm"]),
    ("qwen3_moe", 2, PARTS, [EP, "2", *ALLTOALL]),
    ("qwen3_moe", 2, ["linear_fc1", "linear_fc2"], [TP, "2", SP, ETP, "1", *ALLTOALL]),
    ("qwen3_moe", 2, ["linear_fc1", "linear_fc2"], [*OVERLAPS, "--moe-grouped-gemm"]),
    ("qwen3_moe", 2, ["linear_q"], [EP, "2", *OVERLAPS, *ALLTOALL]),
    ("qwen3_moe", 2, FUSED, [TP, "2", SP, ETP, "2", "--moe-grouped-gemm", *ALLTOALL]),
    ("qwen3_moe", 4, PARTS, [EP, "2", TP, "2", SP, ETP, "1", *ALLTOALL]),
    ("qwen3_moe", 4, FUSED, [EP, "2", TP, "2", SP, ETP, "2", "--moe-grouped-gemm", *OVERLAPS, *ALLTOALL]),
]


class Case:
    """A toy with an adapter in PEFT's files, and what the reference makes of it."""

    def __init__(self, toy: str, targets: list[str], folder: Path) -> None:
        self.folder = save_toy(toy, folder / "model")
        self.targets = targets
        self.adapter = reference.make_adapter(self.folder, folder / "adapter", targets)
        samples = make_samples(count=64, vocabulary=VOCABULARY)
        tensors = {
            name.removeprefix("base_model.model."): value
            for name, value in load_file(self.adapter / "adapter_model.safetensors").items()
        }
        model: Any
        if "moe" in toy or set(targets) & {"linear_qkv", "linear_fc1"}:
            model = reference.Added(self.folder, tensors, targets)
            trained = model.trained()
        else:
            model = reference.with_peft(self.folder, self.adapter)
            trained = reference.of_peft(model)
        self.trace = reference.train(model, trained, samples, steps=STEPS)

    def flags(self, flags: list[str]) -> list[str]:
        lora = ["--lora-target-modules", *self.targets, "--lora-r", str(RANK), "--lora-alpha", str(ALPHA)]
        lora += ["--adam-eps", str(reference.RECIPE["eps"])]
        return [*flags, *lora, "--load", str(self.folder), "--lora-load", str(self.adapter)]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Cases by toy and targets, made once."""
    made: dict[Any, Case] = {}

    def case(toy: str, targets: list[str]) -> Case:
        key = (toy, *targets)
        if key not in made:
            made[key] = Case(toy, targets, tmp_path_factory.mktemp("lora"))
        return made[key]

    return case


def run(rank_pool: RankPool, case: Case, ranks: int, flags: list[str], **options: Any) -> list[dict[str, Any]]:
    rows = rank_pool.run(
        ROW, ranks=ranks, folder=str(case.folder), flags=case.flags(flags), steps=options.pop("steps", STEPS), **options
    )
    assert all(row["error"] is None for row in rows), rows[0]["error"]
    return rows


def name_of(value: Any) -> str | None:
    return value if isinstance(value, str) else "-".join(value) if isinstance(value, list) else None


@pytest.mark.parametrize(
    ("toy", "ranks", "targets", "flags"),
    [*ALWAYS, *(pytest.param(*row, marks=pytest.mark.sampled(14)) for row in SOMETIMES)],
    ids=name_of,
)
def test_equals_peft(
    rank_pool: RankPool, cases: Any, toy: str, ranks: int, targets: list[str], flags: list[str]
) -> None:
    case = cases(toy, targets)
    rows = run(rank_pool, case, ranks, flags)
    folder = case.folder
    found = Trace(losses=rows[0]["losses"], grad_norms=rows[0]["grad_norms"], weights=hub_adapter(folder, rows))
    assert_parity(found, case.trace)
    if "--use-distributed-optimizer" not in flags:
        # There a rank's gradients are whole after the step only. Elsewhere they are sums over targets, not means.
        gradients = hub_adapter(folder, rows, "gradients")
        assert gradients.keys() == case.trace.gradients.keys()
        for name, theirs in case.trace.gradients.items():
            assert (gradients[name] - theirs).norm() / theirs.norm() < 1e-5, name
    for row in rows:
        # Nothing else moves, bit for bit; and nothing else has gradients or moments.
        assert row["frozen"] == row["frozen_after"]
        sizes = row["sizes"]
        assert sizes["adapters"] < sizes["all"] / 2
        padding = 128 * ranks * 8 if "--use-distributed-optimizer" in flags else 0
        assert sizes["adapters"] <= sizes["gradients"] <= sizes["adapters"] + padding
        assert sizes["moments"] <= 2 * sizes["adapters"]
        if not padding:
            assert sizes["moments"] == 2 * sizes["adapters"]


def test_the_bias_of_routers_stays(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = save_toy("qwen3_moe", tmp_path / "model")
    values = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    flags = ["--lora-target-modules", "linear_fc2"]
    [row] = rank_pool.run(ROW, ranks=1, folder=str(folder), flags=flags, values=values, steps=STEPS)
    assert row["error"] is None, row["error"]
    assert len([name for chunk in row["frozen"] for name in chunk if name.endswith("router.expert_bias")]) == 4
    assert row["frozen"] == row["frozen_after"]


@pytest.mark.parametrize(
    ("mutant", "toy", "ranks", "targets", "flags"),
    [
        ("gradient_of_a_not_summed", "llama", 2, FUSED, [TP, "2"]),
        ("parts_of_the_sequence_not_summed", "llama", 2, PARTS, [TP, "2", SP]),
        ("columns_not_summed", "llama", 2, FUSED, [TP, "2"]),
        ("scale_forgotten", "llama", 2, FUSED, [TP, "2"]),
        ("parts_in_a_row", "llama", 1, PARTS, []),
        ("experts_not_summed", "qwen3_moe", 2, PARTS, CUT_EXPERTS),
        ("experts_counted_as_others", "qwen3_moe", 2, PARTS, WHOLE_EXPERTS),
    ],
    ids=name_of,
)
def test_mutants_are_caught(
    rank_pool: RankPool, cases: Any, mutant: str, toy: str, ranks: int, targets: list[str], flags: list[str]
) -> None:
    case = cases(toy, targets)
    rows = run(rank_pool, case, ranks, flags, steps=1, mutant=mutant)
    theirs = case.trace
    loss, norm = rows[0]["losses"][0] / theirs.losses[0] - 1, rows[0]["grad_norms"][0] / theirs.grad_norms[0] - 1
    # Of copies that differ the last one: a rank that is wrong alone is enough.
    gradients = hub_adapter(case.folder, rows, "gradients", copies_alike=False)
    apart = max(float((gradients[name] - grad).norm() / grad.norm()) for name, grad in theirs.gradients.items())
    assert max(abs(loss), abs(norm), apart) > 1e-4


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("toy", "ranks", "targets", "flags"),
    [
        ("llama", 2, PARTS, [TP, "2"]),
        ("llama_tied", 2, FUSED, [PP, "2"]),
        ("qwen3_moe", 2, FUSED, [EP, "2", "--moe-grouped-gemm", *ALLTOALL]),
    ],
    ids=name_of,
)
def test_adapters_begin_alike_on_any_topology(
    rank_pool: RankPool, tmp_path: Path, toy: str, ranks: int, targets: list[str], flags: list[str]
) -> None:
    folder = save_toy(toy, tmp_path / "model")
    lora = ["--lora-target-modules", *targets, "--lora-r", str(RANK), "--load", str(folder)]
    alone, split = (
        hub_adapter(
            folder,
            rank_pool.run(ROW, ranks=count, folder=str(folder), flags=[*words, *lora], steps=0),
            "begun",
        )
        for count, words in ((1, []), (ranks, flags))
    )
    for name, values in alone.items():
        assert torch.equal(values, split[name]), name
        if ".lora_B." in name:
            assert not values.any()
            continue
        # What peft draws: kaiming_uniform with a = sqrt(5).
        peft = torch.nn.init.kaiming_uniform_(torch.empty_like(values), a=5**0.5)
        assert 0.9 < float(values.abs().max() * values.shape[1] ** 0.5) <= 1
        assert abs(float(values.std() / peft.std()) - 1) < 0.3
