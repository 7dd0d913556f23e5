"""Checkpoints go on with other ranks: the loss of each step stays, and so do the samples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.training.checkpointing.conftest import Workplace
from tests.training.checkpointing.test_resume import ALLTOALL, DISTRIBUTED, EP, PP, TP, VPP

pytestmark = pytest.mark.distributed
STEPS, HALF = 8, 3
BAR = 1e-6
GROUPED = ["--moe-grouped-gemm", *ALLTOALL]
# (toy, ranks, flags, ranks and flags afterwards)
ROWS: dict[str, tuple[str, int, list[str], int, list[str]]] = {
    "TP2 to PP2": ("llama", 2, [TP, "2"], 2, [PP, "2"]),
    "PP2 VPP2 to TP2": ("qwen3", 2, [PP, "2", VPP, "1"], 2, [TP, "2", "--sequence-parallel"]),
    "DP2 to one rank": ("llama", 2, [], 1, []),
    "PP2 DP2 tied to TP2, distributed": ("llama_tied", 4, [PP, "2", *DISTRIBUTED], 2, [TP, "2", *DISTRIBUTED]),
    "one rank to DP2 distributed": ("llama", 1, [], 2, DISTRIBUTED),
    "TP2 distributed to PP2": ("qwen3", 2, [TP, "2", *DISTRIBUTED], 2, [PP, "2"]),
    "EP2 to TP2": ("qwen3_moe", 2, [EP, "2", *ALLTOALL], 2, [TP, "2", "--sequence-parallel", *ALLTOALL]),
    "EP2 grouped to PP2": ("mixtral", 2, [EP, "2", *GROUPED, *DISTRIBUTED], 2, [PP, "2", *ALLTOALL, *DISTRIBUTED]),
    "uneven layers": ("llama", 2, [PP, "2", "--num-layer-list", "3,1"], 2, [PP, "2", "--num-layer-list", "1,3"]),
}


def sizes(flags: list[str]) -> tuple[str, ...]:
    """What random numbers depend on."""
    return tuple(flags[flags.index(flag) + 1] if flag in flags else "1" for flag in (TP, PP, EP))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ROWS)
def test_torch_dist_goes_on_with_other_ranks(place: Workplace, tmp_path: Path, name: str) -> None:
    toy, ranks, flags, others, other_flags = ROWS[name]
    whole = place.train(toy, ranks, flags, steps=STEPS, save=tmp_path, saves=[(HALF, "torch_dist", tmp_path)])
    after = place.train(toy, others, other_flags, steps=STEPS, load=tmp_path)
    assert whole[0]["error"] is None and after[0]["error"] is None
    assert len(after[0]["steps"]) == STEPS - HALF
    for (step, loss, norm, rate), (same, other_loss, other_norm, other_rate) in zip(
        whole[0]["steps"][HALF:], after[0]["steps"], strict=True
    ):
        assert (step, rate) == (same, other_rate)
        assert abs(other_loss / loss - 1) < BAR and abs(other_norm / norm - 1) < 1e-5
    assert after[0]["state"].consumed_train_samples == whole[0]["state"].consumed_train_samples
    assert any("was written by other ranks" in line for line in after[0]["log"]) == (sizes(flags) != sizes(other_flags))


def test_bf16_keeps_its_fp32_parameters_under_another_optimizer(place: Workplace, tmp_path: Path) -> None:
    """Without them, weights rounded to bf16 would be trained on. The optimizers differ in the last bit of the norm."""
    plain, distributed = ["--bf16"], ["--bf16", "--use-distributed-optimizer"]
    for first, second in ((plain, distributed), (distributed, plain)):
        folder = tmp_path / str(len(first))
        whole = place.train("llama", 2, first, steps=4, save=folder, saves=[(2, "torch_dist", folder)])
        after = place.train("llama", 2, second, steps=4, load=folder)
        assert after[0]["error"] is None
        assert [step[1] for step in whole[0]["steps"][2:]] == [step[1] for step in after[0]["steps"]]
        assert whole[0]["weights"] == after[0]["weights"]


def test_torch_goes_on_with_other_data_parallel_ranks(place: Workplace, tmp_path: Path) -> None:
    for name, flags in (("plain", []), ("distributed", DISTRIBUTED)):
        folder = tmp_path / name
        whole = place.train("llama", 4, [TP, "2", *flags], steps=5, save=folder, saves=[(2, "torch", folder)])
        after = place.train("llama", 2, [TP, "2", *flags], steps=5, load=folder)
        assert after[0]["error"] is None
        for before, now in zip(whole[0]["steps"][2:], after[0]["steps"], strict=True):
            assert before[0] == now[0] and abs(now[1] / before[1] - 1) < BAR
    # Every parameter in a bucket of its own: no gaps are left behind those whose size is no multiple of 64.
    for refused in place.train("llama", 2, [TP, "2", *flags, "--ddp-bucket-size", "10"], steps=5, load=folder):
        assert re.search(r"distrib_optim\.pt: buffer 0 of the distributed optimizer \(\d+ elements\)", refused["error"])
    assert "--ddp-bucket-size" in refused["error"] and "--no-load-optim" in refused["error"]


@pytest.mark.parametrize(
    ("toy", "flags", "others", "said"),
    [
        ("llama", [TP, "2"], [PP, "2"], "--tensor-model-parallel-size 1 instead of 2, --pipeline-model-parallel-size"),
        ("llama", [PP, "2"], [PP, "2", "--num-layer-list", "3,1"], "--num-layer-list 3,1 instead of none"),
        ("llama", [PP, "2"], [PP, "2", VPP, "1"], "(--num-layers-per-virtual-pipeline-stage) 2 instead of none"),
        ("qwen3_moe", [EP, "2", *GROUPED], [EP, "2", *ALLTOALL], "--moe-grouped-gemm off instead of on"),
    ],
)
def test_torch_is_bound_to_its_ranks(
    place: Workplace, tmp_path: Path, toy: str, flags: list[str], others: list[str], said: str
) -> None:
    place.train(toy, 2, flags, steps=1, save=tmp_path, saves=[(1, "torch", tmp_path)])
    for rank in place.train(toy, 2, others, steps=2, load=tmp_path):
        assert rank["error"].startswith("UserError: ") and said in rank["error"], rank["error"]
        assert "--ckpt-format torch_dist" in rank["error"]
