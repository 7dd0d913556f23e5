"""The training loop: losses that are no numbers, the schedule, and what ranks draw for themselves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.observability.metrics_file import read_metrics
from tests.support.pool import RankPool, RowFailed
from tests.support.reference import make_samples
from tests.support.tokenizers import byte_tokenizer
from tests.support.toys import save_toy

pytestmark = pytest.mark.distributed
ROW = "tests.fsdp2.train.rows"


def train(rank_pool: RankPool, tmp_path: Path, *, steps: int = 4, **options: Any) -> list[dict[str, Any]]:
    folder = save_toy("llama", tmp_path / "model")
    training = {"per_device_train_batch_size": 1, "max_steps": steps, "save_hf_weights": False, "tensorboard": False}
    sections = {"training": training | options.pop("training", {})}
    samples = make_samples(count=steps, vocabulary=509)
    return rank_pool.run(f"{ROW}:train", ranks=1, folder=str(folder), samples=samples, sections=sections, **options)[0]


def test_a_loss_that_is_no_number_stops_the_run(rank_pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RowFailed) as error:
        train(rank_pool, tmp_path, poison_step=3, draw=True)
    ((_, kind, message, _),) = error.value.errors
    assert kind == "NonFiniteLoss"
    assert "step 3: lm loss nan" in message and "training.stop_on_nonfinite_loss: false" in message
    # The record ends with the last good step, and the picture is there.
    metrics = read_metrics(tmp_path / "output" / "metrics.jsonl")
    assert [line["iteration"] for line in metrics] == [1, 2]
    assert (tmp_path / "output" / "loss.png").stat().st_size > 1000


def test_the_run_goes_on_when_told_to(rank_pool: RankPool, tmp_path: Path) -> None:
    results = train(rank_pool, tmp_path, poison_step=3, training={"stop_on_nonfinite_loss": False})
    assert [math.isnan(result["loss"]) for result in results] == [False, False, True, True]
    metrics = read_metrics(tmp_path / "output" / "metrics.jsonl")
    assert [math.isnan(line["lm_loss"]) for line in metrics] == [False, False, True, True]


def test_every_step_runs_with_the_rate_of_the_schedule(rank_pool: RankPool, tmp_path: Path) -> None:
    schedule = {"lr": 0.004, "lr_scheduler_type": "linear", "warmup_ratio": 0.5, "logging_steps": 2}
    results = train(rank_pool, tmp_path, training=schedule)
    assert [result["lr"] for result in results] == pytest.approx([0.0, 0.002, 0.004, 0.002])
    metrics = read_metrics(tmp_path / "output" / "metrics.jsonl")
    # A line speaks of all steps since the last one: the mean over their targets, everything consumed so far.
    assert [line["iteration"] for line in metrics] == [2, 4]
    for line, pair in zip(metrics, (results[:2], results[2:]), strict=True):
        targets = sum(result["targets"] for result in pair)
        assert line["lm_loss"] == pytest.approx(sum(result["nll_sum"] for result in pair) / targets, rel=1e-6)
        assert line["grad_norm"] == pair[1]["grad_norm"]
    assert metrics[1]["consumed_tokens"] == sum(result["tokens"] for result in results)
    assert [line["consumed_samples"] for line in metrics] == [2, 4]


def test_ranks_drop_different_weights_of_the_same_model(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = save_toy("llama", tmp_path / "model")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"attention_dropout": 0.0', '"attention_dropout": 0.5'))
    byte_tokenizer().save_pretrained(folder)
    data = tmp_path / "text.jsonl"
    data.write_text('{"text": "one text"}\n{"text": "another text"}\n' * 8)
    run = tmp_path / "run.yaml"
    run.write_text(
        f"""
model: {{model_name_or_path: {folder}, train_from_scratch: true}}
data: {{dataset: {{file_name: {data}}}, cutoff_len: 16, data_manager_type: mg}}
parallel: {{param_dtype: fp32}}
training: {{output_dir: {tmp_path / "output"}, stage: pt, max_steps: 1, per_device_train_batch_size: 1}}
"""
    )
    rows = rank_pool.run(f"{ROW}:command", ranks=2, argv=[str(run)])
    for name, tensor in rows[0]["weights"].items():
        assert torch.equal(tensor, rows[1]["weights"][name]), name
    (first, second), (other, _) = (row["logits"] for row in rows)
    assert not torch.equal(first, second)  # dropout is at work
    assert not torch.equal(first, other)
    assert not torch.equal(rows[0]["ids"], rows[1]["ids"])
    again = rank_pool.run(f"{ROW}:command", ranks=2, argv=[str(run)])
    for before, now in zip(rows, again, strict=True):
        assert torch.equal(before["logits"][0], now["logits"][0])
