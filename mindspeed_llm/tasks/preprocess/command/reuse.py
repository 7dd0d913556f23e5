"""Whether the output that stands under a prefix is the one that is asked for, and if not, why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_llm.tasks.preprocess.command.identity import InputFile, differences, status_of
from mindspeed_llm.tasks.preprocess.command.output_files import is_as_written
from mindspeed_llm.tasks.preprocess.sample_store import summary_file


def read_content(prefix: Path) -> dict[str, Any]:
    """All that the summary of a prefix says; empty where there is none, or none that this command has written."""
    try:
        content = json.loads(summary_file(prefix).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    ours = isinstance(content, dict) and {"format", "options", "inputs", "files", "written"} <= content.keys()
    return content if ours else {}


def missing_files(prefix: Path, content: Mapping[str, Any]) -> list[str]:
    """The files of an output that are gone, or are not what was written."""
    return [name for name, note in content["written"].items() if not is_as_written(prefix.parent / name, note)]


def why_anew(
    prefix: Path,
    content: Mapping[str, Any],
    *,
    options: Mapping[str, Any],
    files: Sequence[InputFile],
) -> str | None:
    """Why the output of an earlier run, with summary `content`, cannot be used; None where it can.

    `files` are the inputs now; where there are none (pipes, rows from a hub) nobody knows whether they are the same.
    """
    if changed := differences(content["options"], options):
        return f"it was made with other options ({'; '.join(changed)})"
    if not files:
        return "it was made from another pass over a stream, which may have held other records"
    before = content["inputs"]
    if len(before) != len(files) or not all(map(_is_same, before, files)):
        return f"it was made from other inputs ({'; '.join(_changes(before, files))})"
    if gone := missing_files(prefix, content):
        return f"files of it are missing or damaged ({', '.join(gone)})"
    return None


def _is_same(before: Mapping[str, Any], now: InputFile) -> bool:
    if now.hash is not None and before["hash"] is not None:
        return before["hash"] == now.hash and Path(before["path"]).suffix == Path(now.path).suffix
    return status_of(before) == status_of(asdict(now))


def _changes(before: Sequence[Mapping[str, Any]], now: Sequence[InputFile]) -> list[str]:
    old, new = {item["path"]: item for item in before}, {item.path: item for item in now}
    changes = [
        *(f"{path} is new" for path in new if path not in old),
        *(f"{path} is not read any more" for path in old if path not in new),
        *(f"{path} has changed" for path in new if path in old and not _is_same(old[path], new[path])),
    ] or ["in another order"]
    return changes[:3] + [f"{len(changes) - 3} more"] * (len(changes) > 3)
