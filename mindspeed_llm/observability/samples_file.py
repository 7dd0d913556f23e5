"""samples.jsonl: what a model answered at each evaluation, one JSON object per answer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_llm.files import behind_links
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.observability.metrics_file import read_metrics, set_aside

FILE_NAME = "samples.jsonl"
_SHOWN = 60


class SamplesFile:
    """Appends the answers of an evaluation, all at once.

    Follows `MetricsFile`: a run from the beginning sets an earlier file aside, a resumed one drops what it is about to
    write again. With enabled=False (all ranks but 0), or without folder, nothing is written.
    """

    def __init__(self, folder: Path | None, *, enabled: bool, start_iteration: int = 0) -> None:
        """
        Args:
            folder: the one of metrics.jsonl.
            enabled: whether this process records.
            start_iteration: steps that were done before, when resuming.
        """
        self._enabled = enabled
        self._path = folder / FILE_NAME if enabled and folder is not None else None
        self._steps: set[int] = set()
        if self._path is not None and self._path.exists():
            if start_iteration == 0:
                set_aside(self._path)
            else:
                self._keep(lambda step: step <= start_iteration)

    def write(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the rows of the evaluation after `step`, in place of earlier ones; log the first."""
        if not self._enabled or not rows:
            return
        get_logger("train").info(format_sample(step, rows[0]))
        if self._path is None:
            return
        if step in self._steps:
            # The last evaluation of a run comes behind its last checkpoint, and again when one resumes from that.
            self._keep(lambda other: other != step)
        self._steps.add(step)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_lines([{"step": step, **row} for row in rows]))

    def _keep(self, wanted: Callable[[int], bool]) -> None:
        assert self._path is not None
        kept = [row for row in read_metrics(self._path) if wanted(row["step"])]
        self._steps = {row["step"] for row in kept}
        target = behind_links(self._path)
        temporary = target.with_name(target.name + ".tmp")
        temporary.write_text(_lines(kept), encoding="utf-8")
        os.replace(temporary, target)


def format_sample(step: int, row: Mapping[str, Any]) -> str:
    """An answer as a line of the log: the end of the prompt, the beginning of the answer."""
    prompt, answer = _in_a_line(row["prompt"]), _in_a_line(row["answer"])
    if len(prompt) > _SHOWN:
        prompt = "..." + prompt[-_SHOWN:]
    if len(answer) > 2 * _SHOWN:
        answer = answer[: 2 * _SHOWN] + "..."
    return f" sample after iteration {step:8d} | {prompt} >> {answer} | {row['finish_reason']} | "


def _in_a_line(text: str) -> str:
    # A model may say anything, also what moves a terminal's cursor.
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(text.split()))


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
