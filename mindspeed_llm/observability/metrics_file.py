"""metrics.jsonl: one JSON object per logged step, numbers in full precision.

JSON knows no NaN and no infinity. Such a value is written as null, and the object gets a field `nonfinite` that says
which: `{"iteration": 3, "lm_loss": null, "nonfinite": {"lm_loss": "nan"}}`. `read_metrics` turns them back.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from mindspeed_llm.files import behind_links

FILE_NAME = "metrics.jsonl"
_NONFINITE = "nonfinite"


class MetricsFile:
    """Appends objects to a metrics file and flushes each line, so that a killed run keeps what it has logged."""

    def __init__(self, path: Path, *, start_iteration: int = 0) -> None:
        """Open the file for a run that continues after `start_iteration`.

        A run from the beginning sets an earlier file of that name aside (`metrics.1.jsonl`, ...). A resumed run keeps
        the lines up to its starting point and drops the later ones, which it is about to write again. What it writes
        for the starting point itself (an evaluation behind the last step) takes the place of the same line there.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if start_iteration == 0:
                set_aside(path)
            else:
                _keep(path, lambda record: record["iteration"] <= start_iteration)
        self.path, self._start = path, start_iteration
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one object; values are numbers, strings, or None (left out)."""
        if self._start and values.get("iteration") == self._start:
            names = {name for name, value in values.items() if value is not None}
            self._file.close()
            _keep(self.path, lambda record: record["iteration"] != self._start or record.keys() != names)
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(encode(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self._file.close()


def encode(values: Mapping[str, Any]) -> str:
    """One line of JSON without None values, non-finite numbers marked as the module says."""
    line: dict[str, Any] = {}
    nonfinite: dict[str, str] = {}
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            nonfinite[name] = str(value)
            value = None
        line[name] = value
    if nonfinite:
        line[_NONFINITE] = nonfinite
    return json.dumps(line, allow_nan=False)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All objects of a metrics file, non-finite numbers restored. A last line cut short by a kill is left out.

    Raises:
        ValueError: a line before the last is no JSON object.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not a JSON object ({error})") from error
        for name, text in record.pop(_NONFINITE, {}).items():
            record[name] = float(text)
        records.append(record)
    return records


def set_aside(path: Path) -> None:
    """Rename the metrics file of another run to the first free of `metrics.1.jsonl`, `metrics.2.jsonl`, ..."""
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)


def _keep(path: Path, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
    kept = [record for record in read_metrics(path) if wanted(record)]
    path = behind_links(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(encode(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(temporary, path)
