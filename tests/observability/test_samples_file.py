"""samples.jsonl has each evaluation once, whatever happened to the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mindspeed_llm.observability.samples_file import SamplesFile, format_sample

ROW = {"index": 0, "prompt": "a\nb", "answer": "ü\x1b[2J", "reference": "c", "finish_reason": "stop"}


def steps(folder: Path, name: str = "samples.jsonl") -> list[tuple[int, int]]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [(row["step"], row["index"]) for row in rows]


def test_a_resumed_run_writes_what_it_had_written_behind_its_start_again(tmp_path: Path) -> None:
    two = [ROW, ROW | {"index": 1}]
    first = SamplesFile(tmp_path, enabled=True)
    for step in (2, 4, 6):
        first.write(step, two)
    assert steps(tmp_path) == [(2, 0), (2, 1), (4, 0), (4, 1), (6, 0), (6, 1)]
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 8, "ind')  # killed
    again = SamplesFile(tmp_path, enabled=True, start_iteration=4)
    assert steps(tmp_path) == [(2, 0), (2, 1), (4, 0), (4, 1)]
    again.write(4, two)
    again.write(6, two)
    assert steps(tmp_path) == [(2, 0), (2, 1), (4, 0), (4, 1), (6, 0), (6, 1)]


def test_a_new_run_sets_the_file_of_another_aside(tmp_path: Path) -> None:
    SamplesFile(tmp_path, enabled=True).write(2, [ROW])
    SamplesFile(tmp_path, enabled=True).write(3, [ROW])
    assert steps(tmp_path) == [(3, 0)] and steps(tmp_path, "samples.1.jsonl") == [(2, 0)]


def test_other_ranks_and_runs_without_folder_write_nothing(tmp_path: Path) -> None:
    SamplesFile(tmp_path, enabled=False).write(2, [ROW])
    SamplesFile(None, enabled=True).write(2, [ROW])
    assert list(tmp_path.iterdir()) == []


def test_the_first_answer_is_a_line_of_the_log() -> None:
    assert format_sample(2, ROW) == " sample after iteration        2 | a b >> ü\ufffd[2J | stop | "
    long = format_sample(2, ROW | {"prompt": "p" * 99 + "q", "answer": "a" * 999})
    assert f"...{'p' * 59}q >> {'a' * 120}... |" in long
