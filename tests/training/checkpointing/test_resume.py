"""An interrupted run equals one that was not, bit for bit, on the same ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.training.checkpointing.conftest import Workplace

pytestmark = pytest.mark.distributed
STEPS, HALF = 10, 5
FORMATS = ("torch", "torch_dist")

TP, PP, VPP, EP = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--num-layers-per-virtual-pipeline-stage",
    "--expert-model-parallel-size",
)
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
# Buckets of a few parameters each, which the padding between them tells apart.
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "3000"]
ALLTOALL = ["--moe-token-dispatcher-type", "alltoall"]
# An overflow halves the scale: it is another one when the run is interrupted than at its start.
FP16 = ["--fp16", "--initial-loss-scale", "262144", "--hysteresis", "1", "--no-check-for-nan-in-loss-and-grad"]
# (toy, ranks, flags)
ROWS: dict[str, tuple[str, int, list[str]]] = {
    "one rank": ("qwen3", 1, DROPOUT),
    "TP2": ("llama", 2, [TP, "2", "--sequence-parallel", *DROPOUT]),
    "PP2": ("llama_tied", 2, [PP, "2", *DROPOUT]),
    "PP2 VPP2": ("qwen3", 2, [PP, "2", VPP, "1"]),
    "DP2": ("llama", 2, DROPOUT),
    "DP2 distributed": ("qwen3", 2, [*DISTRIBUTED, "--overlap-param-gather", *DROPOUT]),
    "EP2": ("qwen3_moe", 2, [EP, "2", *ALLTOALL, *DROPOUT]),
    "EP2 distributed": ("mixtral", 2, [EP, "2", "--moe-grouped-gemm", *ALLTOALL, *DISTRIBUTED]),
    "TP2 PP2 tied": ("llama_tied", 4, [TP, "2", PP, "2"]),
    "DP2 PP2 tied distributed bf16": ("llama_tied", 4, ["--bf16", PP, "2", *DISTRIBUTED]),
    "bf16": ("llama", 1, ["--bf16", *DROPOUT]),
    "fp16": ("llama", 2, [TP, "2", *FP16]),
}


class Interrupted:
    """Runs of ten steps that save after five in both formats; each is made once."""

    def __init__(self, place: Workplace, folder: Path) -> None:
        self._place, self._folder = place, folder
        self._made: dict[str, list[Any]] = {}

    def folder(self, name: str, kind: str) -> Path:
        return self._folder / name.replace(" ", "_") / kind

    def whole(self, name: str) -> list[Any]:
        if name not in self._made:
            toy, ranks, flags = ROWS[name]
            saves = [(HALF, kind, self.folder(name, kind)) for kind in FORMATS]
            self._made[name] = self._place.train(toy, ranks, flags, steps=STEPS, save=self._folder, saves=saves)
            assert [rank["error"] for rank in self._made[name]] == [None] * ranks
        return self._made[name]

    def resumed(self, name: str, kind: str, **options: Any) -> list[Any]:
        self.whole(name)
        toy, ranks, flags = ROWS[name]
        return self._place.train(toy, ranks, flags, steps=STEPS, load=self.folder(name, kind), **options)


@pytest.fixture(scope="module")
def runs(place: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    return Interrupted(place, tmp_path_factory.mktemp("resume"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ROWS)
def test_a_resumed_run_is_the_same(runs: Interrupted, name: str) -> None:
    whole = runs.whole(name)
    for kind in FORMATS:
        for before, after in zip(whole, runs.resumed(name, kind), strict=True):
            assert after["error"] is None, kind
            assert after["start"] == HALF
            assert before["steps"][HALF:] == after["steps"], kind
            for key in ("weights", "draws", "scale"):
                assert before[key] == after[key], (kind, key)
            assert replace(before["state"], last_checkpoint=None) == after["state"], kind
    if name == "fp16":
        assert 1 < whole[0]["scale"] < 262144 and whole[0]["state"].skipped_iterations


def test_saving_changes_nothing(runs: Interrupted, place: Workplace) -> None:
    name = "DP2 distributed"
    toy, ranks, flags = ROWS[name]
    without = place.train(toy, ranks, flags, steps=STEPS)
    for left, right in zip(without, runs.whole(name), strict=True):
        assert all(left[key] == right[key] for key in ("steps", "weights", "draws"))


@pytest.mark.parametrize(
    ("mutant", "name", "kind"),
    [
        ("no moments", "bf16", "torch"),
        ("no step count", "bf16", "torch"),
        ("no step count", "bf16", "torch_dist"),
        ("no random numbers", "bf16", "torch"),
        ("no schedule", "bf16", "torch"),
        ("samples again", "bf16", "torch_dist"),
        ("no loss scale", "fp16", "torch"),
    ],
)
def test_mutants_are_noticed(runs: Interrupted, mutant: str, name: str, kind: str) -> None:
    resumed = runs.resumed(name, kind, mutant=mutant)
    assert resumed[0]["error"] is None
    assert runs.whole(name)[0]["steps"][HALF:] != resumed[0]["steps"]
