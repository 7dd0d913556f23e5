"""metrics.jsonl: valid JSON, full precision, and one run per file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mindspeed_llm.observability.metrics_file import MetricsFile, read_metrics


def _reject(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    values = {"iteration": 1, "lm_loss": 0.1 + 0.2, "tiny": 5e-324, "large": 1.7976931348623157e308, "mfu": None}
    file = MetricsFile(path)
    file.write(values)
    assert read_metrics(path) == [{name: value for name, value in values.items() if value is not None}], "flushed"
    file.close()
    file.close()


def test_non_finite_numbers_are_valid_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"iteration": 1, "lm_loss": math.nan, "grad_norm": math.inf, "other": -math.inf})
    file.close()
    line = json.loads(path.read_text(), parse_constant=_reject)
    assert line == {
        "iteration": 1,
        "lm_loss": None,
        "grad_norm": None,
        "other": None,
        "nonfinite": {"lm_loss": "nan", "grad_norm": "inf", "other": "-inf"},
    }
    [record] = read_metrics(path)
    assert math.isnan(record["lm_loss"]) and record["grad_norm"] == math.inf and record["other"] == -math.inf


def _write(path: Path, iterations: range, *, start_iteration: int = 0) -> None:
    file = MetricsFile(path, start_iteration=start_iteration)
    for iteration in iterations:
        file.write({"iteration": iteration, "lm_loss": math.nan if iteration == 1 else float(iteration)})
    file.close()


def test_a_run_from_the_start_sets_the_old_file_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for last in (2, 3, 4):
        _write(path, range(1, last + 1))
    counts = {file.name: len(read_metrics(file)) for file in tmp_path.iterdir()}
    assert counts == {"metrics.1.jsonl": 2, "metrics.2.jsonl": 3, "metrics.jsonl": 4}


def test_a_resumed_run_replaces_what_came_after_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 6))
    with path.open("a") as file:
        file.write('{"iteration": 6, "lm_l')  # the process was killed while it wrote
    _write(path, range(4, 8), start_iteration=3)
    records = read_metrics(path)
    assert [record["iteration"] for record in records] == [1, 2, 3, 4, 5, 6, 7]
    assert math.isnan(records[0]["lm_loss"])
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_an_evaluation_that_a_resumed_run_repeats_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 4))
    for loss in (1.0, 0.5):
        file = MetricsFile(path, start_iteration=3)
        file.write({"iteration": 3, "eval_loss": loss, "eval_tokens": 7, "other": None})
        file.write({"iteration": 3, "eval_loss_test": loss})
        file.close()
    records = read_metrics(path)
    assert [record["iteration"] for record in records] == [1, 2, 3, 3, 3]
    assert records[2]["lm_loss"] == 3.0
    assert records[3:] == [
        {"iteration": 3, "eval_loss": 0.5, "eval_tokens": 7},
        {"iteration": 3, "eval_loss_test": 0.5},
    ]


def test_damage_before_the_last_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iterat\n{"iteration": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not a JSON object"):
        read_metrics(path)
