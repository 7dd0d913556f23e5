"""The summary at the end of the quick start reads what the run wrote, and fails where there is nothing to show."""

import math
import re
from pathlib import Path

import pytest

from mindspeed_llm.observability import metrics_file
from scripts import show_run


def write_run(folder: Path, losses: list[tuple[int, float]]) -> Path:
    lines = [{"iteration": 1, "lm_loss": 9.0}, *(_evaluation(*pair) for pair in losses)]
    (folder / "metrics.jsonl").write_text("".join(metrics_file.encode(line) + "\n" for line in lines))
    (folder / "loss.png").write_bytes(b"png")
    (folder / "config.json").write_text("{}")
    return folder


def _evaluation(iteration: int, loss: float) -> dict[str, float]:
    return {"iteration": iteration, "eval_loss": loss, "eval_perplexity": math.exp(loss)}


def test_a_loss_without_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, [(0, 2.0), (16, 1.5)])
    path = tmp_path / "metrics.jsonl"
    path.write_text(re.sub(r', "eval_perplexity": [^}]*', "", path.read_text()))
    assert show_run.main([str(tmp_path)]) == 0
    assert "after   1.5000  (iteration 16)\n" in capsys.readouterr().out


def test_prints_first_and_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, [(0, 2.0), (8, 1.9), (16, 1.5)])
    assert show_run.main([str(tmp_path), "--require-improvement"]) == 0
    out = capsys.readouterr().out
    assert "before  2.0000  (iteration 0, perplexity 7.39)" in out
    assert "after   1.5000  (iteration 16, perplexity 4.48)" in out
    assert str(tmp_path / "loss.png") in out


@pytest.mark.parametrize("after", [2.0, 2.1, float("nan")])
def test_no_improvement(tmp_path: Path, after: float, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, [(0, 2.0), (16, after)])
    assert show_run.main([str(tmp_path), "--require-improvement"]) == 1
    assert "did not fall" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "message"),
    [("metrics.jsonl", "has not logged"), ("loss.png", "does not exist"), ("config.json", "no exported model")],
)
def test_missing_files(tmp_path: Path, missing: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (write_run(tmp_path, [(0, 2.0), (16, 1.0)]) / missing).unlink()
    assert show_run.main([str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_one_evaluation_is_not_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, [(16, 1.0)])
    assert show_run.main([str(tmp_path)]) == 1
    assert "eval_on_start" in capsys.readouterr().err
