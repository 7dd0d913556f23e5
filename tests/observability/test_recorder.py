"""A recorded run: every file holds what the trainer reported, also after an interruption."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import mindspeed_llm
from mindspeed_llm.observability.metrics_file import read_metrics
from mindspeed_llm.observability.recorder import RunRecorder
from mindspeed_llm.observability.versions import versions, write_versions
from tests.observability.records import step


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    logger = logging.getLogger("mindspeed_llm")
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger="mindspeed_llm")
    return caplog


def _recorder(folder: Path | None, **changes: Any) -> RunRecorder:
    arguments: dict[str, Any] = {
        "total_steps": 4,
        "enabled": True,
        "tensorboard": True,
        "log_throughput": False,
        "log_cpu_memory": False,
        "show_progress": False,
    }
    return RunRecorder(folder, **(arguments | changes))


def test_a_run_leaves_all_its_files(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    with _recorder(tmp_path / "out") as recorder:
        recorder.eval(0, 3.5, 100, 0.25)
        recorder.train_step(step(iteration=1, lm_loss=3.25, mfu=0.5, extra={"rewards_chosen": 0.125}))
        recorder.train_step(step(iteration=2, lm_loss=3.0, aux_loss=0.75))
        recorder.eval(2, 3.0, 100, 0.25)
        recorder.eval(2, 2.0, 50, 0.25, name="code")
        recorder.eval(2, 0.5, 60, 0.25, metrics={"rewards_margin": 0.25}, has_perplexity=False)
        recorder.completed()
    records = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [record["iteration"] for record in records] == [0, 1, 2, 2, 2, 2]
    assert set(records[1]) == {
        "iteration",
        "lm_loss",
        "grad_norm",
        "learning_rate",
        "consumed_samples",
        "consumed_tokens",
        "elapsed_ms_per_iteration",
        "tokens_per_second",
        "max_memory_allocated_gb",
        "max_memory_reserved_gb",
        "global_batch_size",
        "mfu",
        "rewards_chosen",
    }
    assert records[2]["aux_loss"] == 0.75 and "mfu" not in records[2]
    assert records[3] == {
        "iteration": 2,
        "eval_loss": 3.0,
        "eval_perplexity": pytest.approx(math.exp(3.0)),
        "eval_tokens": 100,
        "eval_seconds": 0.25,
    }
    assert records[4]["eval_loss_code"] == 2.0 and "eval_loss" not in records[4]
    # A loss that is no likelihood has no perplexity, in no place.
    assert records[5] == {
        "iteration": 2,
        "eval_loss": 0.5,
        "eval_tokens": 60,
        "eval_seconds": 0.25,
        "eval_rewards_margin": 0.25,
    }
    assert ["perplexity" in line for line in lines.messages if "eval loss" in line] == [True, True, True, False]

    events = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/lm_loss")] == [(1, 3.25), (2, 3.0)]
    assert [(event.step, event.value) for event in events.Scalars("eval/eval_loss")] == [
        (0, 3.5),
        (2, 3.0),
        (2, 0.5),
    ]
    assert {"train/grad_norm", "train/rewards_chosen", "eval/eval_loss_code"} <= set(events.Tags()["scalars"])

    assert (tmp_path / "out" / "loss.png").stat().st_size > 5000
    messages = [record.getMessage() for record in lines.records]
    assert "lm loss: 3.250000E+00" in messages[1]
    assert messages[-1].startswith("Training completed in ") and messages[-1].endswith("s")


def test_an_interrupted_run_has_its_picture_too(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), _recorder(tmp_path) as recorder:
        recorder.train_step(step(iteration=1))
        raise KeyboardInterrupt
    assert (tmp_path / "loss.png").exists()
    recorder.close()


def test_a_run_without_any_step_closes(tmp_path: Path) -> None:
    _recorder(tmp_path).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_resumed_run_draws_and_keeps_the_steps_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _recorder(tmp_path) as recorder:
        for iteration in (1, 2, 3):
            recorder.train_step(step(iteration=iteration, lm_loss=10.0 + iteration))
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(
        "mindspeed_llm.observability.loss_plot.write_loss_plot", lambda path, **curves: drawn.update(curves)
    )
    with _recorder(tmp_path, start_iteration=2) as recorder:
        recorder.train_step(step(iteration=3, lm_loss=math.inf))
        recorder.eval(3, 4.0, 1, 1.0)
    assert drawn["iterations"] == [1, 2, 3] and drawn["losses"] == [11.0, 12.0, math.inf]
    assert drawn["eval_iterations"] == [3] and drawn["eval_losses"] == [4.0]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/lm_loss")] == [
        (1, 11.0),
        (2, 12.0),
        (3, math.inf),
    ]


def test_other_ranks_write_nothing(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    with _recorder(tmp_path / "none", enabled=False) as recorder:
        recorder.train_step(step())
        recorder.eval(1, 1.0, 1, 1.0)
        recorder.completed()
        assert recorder.write_plot() is None
    assert not (tmp_path / "none").exists() and not lines.records


def test_no_events_without_tensorboard(tmp_path: Path) -> None:
    _recorder(tmp_path, tensorboard=False).close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_versions_are_those_that_run(tmp_path: Path) -> None:
    found = json.loads(write_versions(tmp_path, device_name="Ascend910B3").read_text())
    assert found == versions(device_name="Ascend910B3")
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["mindspeed_llm"] == mindspeed_llm.__version__
    assert found["device"] == "Ascend910B3"
    assert {"python", "transformers", "megatron-core", "system"} <= found.keys()


def test_packages_that_add_a_device_to_torch_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch_toy-1.2.3.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_toy\nVersion: 1.2.3\n")
    (package / "entry_points.txt").write_text("[torch.backends]\ntorch_toy = torch_toy:autoload\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert versions()["torch_toy"] == "1.2.3"


def test_without_a_folder_steps_are_logged_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with _recorder(None) as recorder:
        recorder.train_step(step(iteration=1))
        recorder.eval(1, 2.0, 10, 0.1)
    assert list(tmp_path.iterdir()) == []
    assert "iteration" in lines.text and "eval loss" in lines.text
