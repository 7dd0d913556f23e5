"""The training line, character by character, and through the patterns that users' scripts search for."""

from __future__ import annotations

import math
import re

import pytest

from mindspeed_llm.observability import log_line
from tests.observability.records import step


def test_the_line_of_a_step() -> None:
    assert log_line.format_step(step(), total_steps=2000) == (
        " iteration        3/    2000 | consumed samples:         24 | consumed tokens:       6144 |"
        " elapsed time per iteration (ms): 1234.57 | learning rate: 9.876543E-06 | global batch size:     8 |"
        " lm loss: 2.345679E+00 | mtp loss: 0.000000E+00 | grad norm: 1.235 | max_memory_allocated(GB): 1.00 |"
        " max_memory_reserved(GB): 2.35 | "
    )


def test_the_optional_fields_stand_in_their_places() -> None:
    record = step(
        mfu=0.41237,
        aux_loss=0.5,
        mtp_loss=3.25,
        cpu_used_memory_gb=10.126,
        cpu_available_memory_gb=20.0,
        cpu_memory_usage_percent=33.33,
        extra={"indexer_loss": 0.125},
    )
    line = log_line.format_step(record, total_steps=10, log_throughput=True, log_cpu_memory=True)
    names = [field.split(":")[0].strip() for field in line.split("|")[:-1]]
    assert names == [
        "iteration        3/      10",
        "consumed samples",
        "consumed tokens",
        "elapsed time per iteration (ms)",
        "tokens/s",
        "mfu",
        "learning rate",
        "global batch size",
        "lm loss",
        "mtp loss",
        "aux loss",
        "indexer loss",
        "grad norm",
        "max_memory_allocated(GB)",
        "max_memory_reserved(GB)",
        "cpu_used_memory(GB)",
        "cpu_available_memory(GB)",
        "cpu_memory_usage(%)",
    ]
    for text in (
        "tokens/s: 1658.91 | mfu: 41.24 |",
        "mtp loss: 3.250000E+00 | aux loss: 5.000000E-01 | indexer loss: 1.250000E-01 |",
        "cpu_used_memory(GB): 10.13 | cpu_available_memory(GB): 20.00 | cpu_memory_usage(%): 33.3 |",
    ):
        assert text in line


def test_an_unknown_utilisation_is_left_out() -> None:
    line = log_line.format_step(step(mfu=None), total_steps=10, log_throughput=True)
    assert "tokens/s: 1658.91 | learning rate" in line


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        (r"elapsed time per iteration \(ms\): ([0-9.]+) \|", 1234.57),
        (r"lm loss: ([0-9.E+-]+) \|", 2.345679),
        (r"grad norm: ([0-9.]+)", 1.235),
        (r"iteration\s+3/\s*2000 \|.*max_memory_allocated\(GB\): ([0-9.]+)", 1.0),
    ],
)
def test_the_usual_patterns_find_their_numbers(pattern: str, value: float) -> None:
    match = re.search(pattern, log_line.format_step(step(), total_steps=2000))
    assert match is not None and float(match[1]) == value


def test_the_line_of_an_evaluation_is_not_taken_for_a_training_line() -> None:
    line = log_line.format_eval(iteration=3, eval_loss=math.log(20), eval_tokens=512, elapsed_s=1.5, name="wiki")
    assert "validation wiki after iteration        3 | eval loss: 2.995732E+00 | perplexity: 20.0000 |" in line
    assert not re.search(r"iteration\s+\d+/", line)


def test_perplexity_past_the_largest_float_is_infinite() -> None:
    assert log_line.perplexity(0.0) == 1.0
    assert log_line.perplexity(1e6) == math.inf
    assert math.isnan(log_line.perplexity(math.nan))


def test_the_banner_and_the_last_line() -> None:
    lines = log_line.banner(
        backend="FSDP2",
        num_examples=64,
        num_epochs=0.5,
        total_batch_size=8,
        gradient_accumulation_steps=2,
        total_steps=4,
    )
    assert lines[0] == "***** Running training (FSDP2) *****"
    assert [line.split(" = ") for line in lines[1:]] == [
        ["  Num examples", "64"],
        ["  Num Epochs", "0.5"],
        ["  Total Batch Size", "8"],
        ["  Gradient Accumulation steps", "2"],
        ["  Total optimization steps", "4"],
    ]
    assert log_line.completed(12.345) == "Training completed in 12.35s"
