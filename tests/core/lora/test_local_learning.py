"""Local updates equal Oja's rule in a few lines of torch on transformers' model, for any topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.core.lora import local_reference, reference
from tests.core.lora.assembled import hub_adapter
from tests.core.lora.local_reference import FALLING
from tests.core.lora.reference import ALPHA, RANK
from tests.core.lora.test_parity import ALLTOALL, EP, FULL, FUSED, OVERLAPS, PARTS, PP, SP, TP, name_of
from tests.support.pool import RankPool
from tests.support.reference import Trace, assert_parity, make_samples
from tests.support.toys import VOCABULARY, save_toy

pytestmark = pytest.mark.distributed
STEPS, RATE, RATIO, MICRO_BATCHES = 3, 2e-3, 2.0, 4
ROW = "tests.core.lora.local_rows:train"
# (toy, ranks, targets, final layer, flags); the first four are part of each run of CI.
ROWS: list[tuple[str, int, list[str], int, list[str]]] = [
    ("llama", 1, FUSED, 1, FULL),
    ("llama", 2, PARTS, 1, [TP, "2", SP]),
    ("llama", 2, FUSED, 2, [PP, "2", *FULL]),
    ("llama", 2, PARTS, 1, OVERLAPS),
    ("llama", 2, FUSED, 1, [TP, "2"]),
    ("llama", 2, FUSED, 1, [PP, "2"]),
    ("llama", 2, PARTS, 1, [PP, "2", "--noop-layers", "0,3"]),
    ("llama", 2, FUSED, 1, [PP, "2", *OVERLAPS, "--num-layers-per-virtual-pipeline-stage", "1"]),
    ("llama", 4, FUSED, 2, [PP, "2", TP, "2", SP, *FULL[:2], "--recompute-method", "block", *FULL[4:]]),
    ("qwen3_moe", 2, ["linear_q", "linear_proj"], 1, [EP, "2", *ALLTOALL]),
]


class Case:
    """A toy with an adapter in PEFT's files, and what the reference makes of it."""

    def __init__(self, toy: str, targets: list[str], final_layer: int, folder: Path) -> None:
        self.folder, self.targets, self.final_layer = save_toy(toy, folder / "model"), targets, final_layer
        self.adapter = reference.make_adapter(self.folder, folder / "adapter", targets)
        self.begun = {
            name.removeprefix("base_model.model."): value
            for name, value in load_file(self.adapter / "adapter_model.safetensors").items()
        }
        self.trace = local_reference.train(
            reference.Added(self.folder, self.begun, targets),
            make_samples(count=64, vocabulary=VOCABULARY),
            final_layer=final_layer,
            rate=RATE,
            ratio=RATIO,
            steps=STEPS,
        )

    def flags(self, flags: list[str]) -> list[str]:
        lora = ["--lora-target-modules", *self.targets, "--lora-r", str(RANK), "--lora-alpha", str(ALPHA)]
        lora += ["--adam-eps", str(reference.RECIPE["eps"]), "--lu-lora-final-layer-index", str(self.final_layer)]
        lora += ["--lu-lora-lr", str(RATE), "--lu-lora-lr-ratio", str(RATIO), *FALLING]
        return [*flags, *lora, "--load", str(self.folder), "--lora-load", str(self.adapter)]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Cases, made once."""
    made: dict[Any, Case] = {}

    def case(toy: str, targets: list[str], final_layer: int) -> Case:
        key = (toy, final_layer, *targets)
        if key not in made:
            made[key] = Case(toy, targets, final_layer, tmp_path_factory.mktemp("local"))
        return made[key]

    return case


def run(rank_pool: RankPool, case: Case, ranks: int, flags: list[str], **options: Any) -> list[dict[str, Any]]:
    options.setdefault("steps", STEPS)
    rows = rank_pool.run(ROW, ranks=ranks, folder=str(case.folder), flags=case.flags(flags), **options)
    assert all(row["error"] is None for row in rows), rows[0]["error"]
    return rows


def local_updates_apart(found: dict[str, torch.Tensor], case: Case) -> float:
    """How far the farthest local update is from the reference's, relative to the latter."""
    theirs = case.trace.weights
    names = [name for name in theirs if int(name.split(".")[2]) <= case.final_layer]
    return max(float((found[name] - theirs[name]).norm() / (theirs[name] - case.begun[name]).norm()) for name in names)


@pytest.mark.parametrize(
    ("toy", "ranks", "targets", "final_layer", "flags"),
    [*ROWS[:4], *(pytest.param(*row, marks=pytest.mark.sampled(6)) for row in ROWS[4:])],
    ids=name_of,
)
def test_equals_ojas_rule_and_backpropagation(
    rank_pool: RankPool, cases: Any, toy: str, ranks: int, targets: list[str], final_layer: int, flags: list[str]
) -> None:
    case = cases(toy, targets, final_layer)
    rows = run(rank_pool, case, ranks, flags, evaluates=True)
    weights = hub_adapter(case.folder, rows)
    found = Trace(losses=rows[0]["losses"], grad_norms=rows[0]["grad_norms"], weights=weights)
    assert_parity(found, case.trace)
    assert local_updates_apart(weights, case) < 2e-4
    for row in rows:
        assert row["frozen"] == row["frozen_after"]
        # Computed once in each micro batch, without gradients coming in; they begin behind the last local layer alone.
        numbers = {number for number, _, _ in row["forwards"]}
        assert len(row["forwards"]) == len(numbers) * STEPS * MICRO_BATCHES // row["args"].data_parallel_size
        assert not any(of_input for _, of_input, _ in row["forwards"])
        assert {number for number, _, of_output in row["forwards"] if of_output} <= {max(numbers, default=0)}
