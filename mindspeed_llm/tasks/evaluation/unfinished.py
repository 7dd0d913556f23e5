"""Samples that are answered before all are: kept on disk, so that an evaluation that was ended goes on.

Each copy of the model appends a line for each block that it has finished to `unfinished/<task>.<key>.<rank>.jsonl`. The
key is a hash of all that decides an answer; samples under another key are left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from mindspeed_llm.files import sync_folder
from mindspeed_llm.observability.log import get_logger
from mindspeed_llm.tasks.evaluation.judge import SampleResult
from mindspeed_llm.tasks.evaluation.ranks import Ranks
from mindspeed_llm.tasks.evaluation.results import writing

FOLDER = "unfinished"
_LOG = get_logger("evaluation")
_KEY_LENGTH = 16

Finished = dict[tuple[str, int], SampleResult]
"""(subject, index) -> the sample, its prompt left out."""


def key_of(decisive: Mapping[str, Any]) -> str:
    """A hash of all that decides the answers to a task."""
    return hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()


class Unfinished:
    """The samples of one evaluation that are there already, and the files that new ones go to."""

    def __init__(self, folder: Path, decisive: Mapping[str, Mapping[str, Any]], ranks: Ranks) -> None:
        """
        Args:
            folder: that of the results.
            decisive: all that decides the answers to each task.
        """
        self._folder = folder / FOLDER
        self._decisive = {task: dict(facts) for task, facts in decisive.items()}
        self._stems = {task: f"{task}.{key_of(facts)[:_KEY_LENGTH]}" for task, facts in self._decisive.items()}
        self._ranks = ranks
        self._streams: dict[str, TextIO] = {}

    def read(self) -> dict[str, Finished]:
        """What is finished of each task (a collective). What other settings have left is named in the log."""
        found: dict[str, Finished] = {task: {} for task in self._stems}
        # Nodes need not share a disk.
        if self._ranks.is_first_of_node:
            for task, stem in self._stems.items():
                for file in sorted(self._folder.glob(f"{stem}.*.jsonl")):
                    found[task].update(_samples(file))
        for other in self._ranks.gather_everywhere(found):
            for task, samples in other.items():
                found[task].update(samples)
        if self._ranks.rank == 0:
            self._tell(found)
        return found

    def add(self, task: str, samples: Sequence[SampleResult]) -> None:
        """Keep the samples of a block; they are on the disk when this returns. Raises UserError: they cannot be
        written.
        """
        rows = [{name: value for name, value in asdict(sample).items() if name != "prompt"} for sample in samples]
        with writing(self._folder.parent):
            stream = self._streams.get(task) or self._open(task)
            stream.write(json.dumps({"samples": rows}, ensure_ascii=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def close(self) -> None:
        """Close the files of this rank."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def count(self) -> int:
        """Samples on this machine's disk, those of an earlier run included."""
        return sum(
            len({key for file in self._folder.glob(f"{stem}.*.jsonl") for key in _samples(file)})
            for stem in self._stems.values()
        )

    def remove(self) -> None:
        """Remove all files of this evaluation: its results are published."""
        for stem in self._stems.values():
            for file in self._folder.glob(f"{stem}.*.jsonl"):
                file.unlink(missing_ok=True)
        if self._folder.is_dir() and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def _open(self, task: str) -> TextIO:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._stems[task]}.{self._ranks.rank:05d}.jsonl"
        is_new = not path.exists()
        if not is_new:
            _drop_half_line(path)
        stream = self._streams[task] = path.open("a", encoding="utf-8")
        if is_new:
            stream.write(json.dumps({"decided_by": self._decisive[task]}, sort_keys=True, default=str) + "\n")
            sync_folder(self._folder)
        return stream

    def _tell(self, found: Mapping[str, Finished]) -> None:
        for task, samples in found.items():
            if samples:
                _LOG.info("%s: %d samples of an earlier run are finished, the others follow", task, len(samples))
                continue
            for file in sorted(self._folder.glob(f"{task}.*.jsonl")):
                earlier = _header(file)
                if file.name.startswith(self._stems[task] + ".") or earlier is None:
                    continue
                _LOG.warning(
                    "%s: unfinished samples in %s are of another evaluation (%s); they are left alone, this one begins "
                    "anew. Remove the file if you do not need it.",
                    task,
                    file,
                    _difference(earlier, json.loads(json.dumps(self._decisive[task], default=str))),
                )


def _drop_half_line(path: Path) -> None:
    """Cut off what a killed process has left behind the last whole line."""
    with path.open("rb+") as stream:
        content = stream.read()
        stream.truncate(content.rfind(b"\n") + 1)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that are JSON objects; a line without its end, or with garbage, counts as not there."""
    found = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            content = json.loads(line)
        except ValueError:  # what a crash of the machine has left
            continue
        if isinstance(content, dict):
            found.append(content)
    return found


def _header(path: Path) -> dict[str, Any] | None:
    return next((line["decided_by"] for line in _lines(path) if "decided_by" in line), None)


def _samples(path: Path) -> Finished:
    found: Finished = {}
    for line in _lines(path):
        for row in line.get("samples", ()):
            for name in ("raw", "choices"):
                if isinstance(row[name], list):
                    row[name] = tuple(row[name])
            sample = SampleResult(prompt="", **row)
            found[sample.subject, sample.index] = sample
    return found


def _difference(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**earlier, **now} if earlier.get(name) != now.get(name)]
    shown = [f"{name} {_short(earlier.get(name))}, now {_short(now.get(name))}" for name in names]
    return "; ".join(shown) or "the same settings"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
