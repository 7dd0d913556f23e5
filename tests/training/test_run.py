"""What a whole run of `pretrain_gpt.py` evaluates and writes."""

from __future__ import annotations

import json
import math
import os
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from mindspeed_llm.checkpoints.run_lock import FILE_NAME
from mindspeed_llm.locks import FileLock
from mindspeed_llm.observability.metrics_file import read_metrics
from mindspeed_llm.training.data.datasets import build_datasets
from mindspeed_llm.training.main import main
from mindspeed_llm.training.moe_losses import noting_layers
from tests.support.pool import RankPool
from tests.support.runs import metrics
from tests.support.toys import build_toy, save_toy
from tests.training.arguments.lines import EXPERTS, arguments

pytestmark = pytest.mark.distributed
ERROR = "tests.training.command_rows:error"
ROW = "tests.training.checkpointing.rows:pretrain"


def mean_loss(folder: Path, rows: list[torch.Tensor]) -> float:
    """Of transformers, over all tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        losses = [
            float(model(input_ids=row[None, :-1], shift_labels=row[None, 1:], labels=row[None, 1:]).loss)
            for row in rows
        ]
    return sum(losses) / len(losses)


def test_evaluations_equal_transformers(rank_pool: RankPool, tmp_path: Path) -> None:
    """Each validation of samples of its own, the last one and the test at the end."""
    folder = save_toy("llama", tmp_path / "model")
    flags = (
        f"--model-from-hf {folder} --load {folder} --lr 1e-30 --train-iters 4 --global-batch-size 2 --eval-interval 2 "
        f"--eval-iters 3 --log-interval 1 --save {tmp_path / 'run'} --attention-dropout 0 --hidden-dropout 0 "
        "--pipeline-model-parallel-size 2 --log-params-norm --manual-gc"
    )
    rows = rank_pool.run(ROW, ranks=2, flags=flags)
    assert [row["code"] for row in rows] == [0, 0]
    data = build_datasets(arguments(flags, world_size=2))
    assert data.valid is not None and data.test is not None
    valid = [torch.from_numpy(data.valid.rows[index]).long() for index in range(3 * 6)]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line["eval_loss"] for line in lines if "eval_loss" in line]
    expected = [mean_loss(folder, valid[first : first + 6]) for first in (0, 6)]
    assert found == [pytest.approx(value, rel=1e-5) for value in expected]
    test = [torch.from_numpy(data.test.rows[index]).long() for index in range(6)]
    assert [line["eval_loss_test"] for line in lines if "eval_loss_test" in line] == [
        pytest.approx(mean_loss(folder, test), rel=1e-5)
    ]
    norms = [line["params_norm"] for line in lines if "lm_loss" in line]
    assert len(norms) == 4 and norms[0] > 1 and any(f"params norm: {norms[0]:.3f}" in line for line in rows[0]["log"])


def test_evaluations_leave_the_losses_of_routers_alone(rank_pool: RankPool, tmp_path: Path) -> None:
    """What is logged is the mean over all steps since the last line, also those before an evaluation."""
    found = []
    for name, often in (("without", "--eval-iters 0"), ("with", "--eval-iters 1 --eval-interval 3")):
        flags = (
            f"{EXPERTS} --train-iters 4 --global-batch-size 2 --log-interval 4 --metrics-dir {tmp_path / name} "
            f"--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 {often}"
        )
        assert rank_pool.run(ROW, ranks=1, flags=flags)[0]["code"] == 0
        [line] = [line for line in read_metrics(tmp_path / name / "metrics.jsonl") if "lm_loss" in line]
        found.append((line["aux_loss"], line["z_loss"]))
    assert found[0][0] > 0.5 and found[0] == found[1]


def test_losses_of_routers_are_those_of_the_run(rank_pool: RankPool, tmp_path: Path) -> None:
    """A run that ends before its first line leaves nothing to the next one in the process."""
    losses = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
    flags = f"{EXPERTS} {losses} --train-iters 3 --global-batch-size 2 --eval-iters 0 --log-interval 3"
    found = []
    for name in ("before", "behind"):
        folder = tmp_path / name
        assert rank_pool.run(ROW, ranks=1, flags=f"{flags} --metrics-dir {folder}")[0]["code"] == 0
        [line] = [line for line in read_metrics(folder / "metrics.jsonl") if "lm_loss" in line]
        found.append((line["aux_loss"], line["z_loss"]))
        assert rank_pool.run(ROW, ranks=1, flags=f"{flags} --exit-interval 1")[0]["code"] == 0
    assert found[0][0] > 0.5 and found[0] == found[1]


def test_losses_of_routers_on_some_stages_alone(rank_pool: RankPool, tmp_path: Path) -> None:
    """The stage that logs has no layer with experts; what it logs is the mean over those that have some."""
    found = []
    for name, ranks, stages in (("one", 1, ""), ("two", 2, "--pipeline-model-parallel-size 2")):
        flags = (
            f"{EXPERTS} --first-k-dense-replace 2 --train-iters 2 --global-batch-size 2 --eval-iters 0 {stages} "
            f"--log-interval 2 --metrics-dir {tmp_path / name} --init-method-std 0.5 "
            "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
        )
        assert [row["code"] for row in rank_pool.run(ROW, ranks=ranks, flags=flags)] == [0] * ranks
        [line] = [line for line in read_metrics(tmp_path / name / "metrics.jsonl") if "lm_loss" in line]
        found.append([line["aux_loss"], line["z_loss"]])
    # Stages draw their initial weights apart from each other: the losses are near, as no mean over all layers is.
    assert found[1] == pytest.approx(found[0], rel=0.25)


def test_layers_that_learn_locally_note_no_losses() -> None:
    dense = f"{EXPERTS} --first-k-dense-replace 1"
    local = "--lora-target-modules linear_proj --lu-lora-final-layer-index"
    assert noting_layers(arguments()) == []
    assert noting_layers(arguments(dense)) == [1, 2, 3]
    assert noting_layers(arguments(f"{dense} {local} 2")) == [3]


def test_files_of_a_run(rank_pool: RankPool, tmp_path: Path) -> None:
    flags = (
        f"--train-iters 1 --eval-iters 0 --metrics-dir {tmp_path / 'figures'} --tensorboard-dir {tmp_path / 'board'}"
    )
    assert rank_pool.run(ROW, ranks=1, draw=True, flags=flags)[0]["code"] == 0
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "loss.png",
        "metrics.jsonl",
        "run_config.yaml",
        "versions.json",
    }
    assert [path.name[:7] for path in (tmp_path / "board").iterdir()] == ["events."]
    written = yaml.safe_load((tmp_path / "figures" / "run_config.yaml").read_text())
    assert (written["train_iters"], written["padded_vocab_size"], written["lr"]) == (1, 512, 1e-3)
    versions = json.loads((tmp_path / "figures" / "versions.json").read_text())
    assert {"torch", "megatron-core", "mindspeed_llm", "transformers"} <= versions.keys()


def test_dropout_of_a_hugging_face_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    build_toy("llama", attention_dropout=0.25).save_pretrained(folder)
    line = (
        f"--model-from-hf {folder} --seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --check"
    )
    assert main(shlex.split(line)) == 0
    out = capsys.readouterr().out
    assert "--attention-dropout 0.25" in out and "--hidden-dropout 0" in out
    assert main(shlex.split(f"{line} --attention-dropout 0.5")) == 0
    assert "--attention-dropout" not in capsys.readouterr().out


def test_a_dynamic_loss_scale_finds_its_size(rank_pool: RankPool, tmp_path: Path) -> None:
    """From a scale at which fp16 gradients overflow: steps are skipped, the scale is halved, and training goes on."""
    flags = (
        f"--fp16 --initial-loss-scale {2.0**40} --hysteresis 1 --train-iters 40 --eval-iters 0 --log-interval 1 "
        f"--metrics-dir {tmp_path} --lr-decay-style constant"
    )
    (row,) = rank_pool.run(ROW, ranks=1, flags=flags)
    assert row["code"] == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    skipped = [line["skipped_iterations"] for line in lines]
    first = skipped.index(0)
    assert first > 5 and set(skipped[:first]) == {1} and sum(skipped[first:]) <= 1
    assert lines[first]["loss_scale"] == 2.0 ** (40 - first)
    assert lines[-1]["lm_loss"] < lines[first]["lm_loss"]


@pytest.mark.parametrize("flags", ["", "--clip-grad 0", "--use-distributed-optimizer"])
def test_a_loss_that_is_no_number_names_the_step(rank_pool: RankPool, flags: str) -> None:
    (row,) = rank_pool.run(ERROR, ranks=1, flags=f"--lr 1e30 --train-iters 5 --eval-iters 0 {flags}")
    assert "step 2: lm loss" in row and "Lower --lr" in row


@pytest.mark.parametrize(
    "values", [[math.nan, 0.0], [0.0, math.nan], [math.inf, math.nan], [2.0, 3.0], [math.inf, 1.0]]
)
def test_a_norm_that_is_no_number_reaches_all_stages(rank_pool: RankPool, values: list[float]) -> None:
    expected = math.nan if any(math.isnan(value) for value in values) else max(values)
    found = rank_pool.run("tests.training.command_rows:largest", ranks=2, values=values)
    assert found == [pytest.approx(expected, nan_ok=True)] * 2


def test_the_norm_is_reported_without_clipping(rank_pool: RankPool, tmp_path: Path) -> None:
    norms = []
    for clip in ("0", "1e9"):
        flags = f"--clip-grad {clip} --train-iters 2 --eval-iters 0 --log-interval 1 --metrics-dir {tmp_path / clip}"
        assert rank_pool.run(ROW, ranks=1, flags=flags)[0]["code"] == 0
        norms.append([line["grad_norm"] for line in metrics(tmp_path / clip)])
    assert norms[0] == norms[1] and min(norms[0]) > 0


def test_a_second_run_in_the_same_folder_is_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    lock = FileLock(tmp_path / FILE_NAME, without_locks="")
    lock.take()
    try:
        for flag in ("--save", "--metrics-dir"):
            (row,) = rank_pool.run(ERROR, ranks=1, flags=f"--train-iters 1 --eval-iters 0 {flag} {tmp_path}")
            assert row.startswith(f"UserError: {flag}: another run (process {os.getpid()} on ")
    finally:
        lock.release()
    flags = f"--train-iters 1 --eval-iters 0 --save {tmp_path} --metrics-dir {tmp_path}"
    assert rank_pool.run(ROW, ranks=1, flags=flags)[0]["code"] == 0
    assert not (tmp_path / FILE_NAME).exists()


def test_a_folder_that_cannot_be_made(rank_pool: RankPool) -> None:
    rows = rank_pool.run(ERROR, ranks=2, flags="--train-iters 1 --eval-iters 0 --save /proc/none")
    assert all(row.startswith("UserError: --save: cannot write to /proc/none") for row in rows)
