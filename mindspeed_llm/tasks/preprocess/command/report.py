"""What a run says about its result: a short table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_BAR_WIDTH = 30


def result_lines(content: Mapping[str, Any], files: Mapping[str, int], folder: Path) -> list[str]:
    """The table for a summary file's `content`; `files` are names in `folder` with their sizes in bytes."""
    skipped = sum(content["skipped"].values())
    rows = [
        ("records read", _number(content["num_records"])),
        ("samples written", _number(content["num_samples"])),
        ("records skipped", _number(skipped)),
    ]
    for reason, count in content["skipped"].items():
        rows.append(("", f"{_number(count)}  {reason} (first at {', '.join(content['first_skipped'][reason])})"))
    if content["empty_replies"]:
        rows.append(("empty replies", f"{_number(content['empty_replies'])} (kept)"))
    if content.get("equal_pairs"):
        rows.append(("equal pairs", f"{_number(content['equal_pairs'])} have equal replies (kept)"))
    if content.get("num_packs") is not None:
        rows.append(("packs", _packs(content)))
    rows.append(("tokens", _number(content["num_tokens"])))
    if content["num_targets"]:
        share = content["num_targets"] / max(content["num_tokens"], 1)
        rows.append(("with loss", f"{_number(content['num_targets'])} ({share:.0%})"))
    most = max(content["length_histogram"].values(), default=1)
    for number, (length, count) in enumerate(content["length_histogram"].items()):
        bar = "#" * max(1, round(_BAR_WIDTH * count / most))
        rows.append(("" if number else "lengths in tokens", f"{length:>14} {bar} {_number(count)}"))
    for number, (name, size) in enumerate(files.items()):
        rows.append(("" if number else "files", f"{folder / name}  {_bytes(size)}"))
    return [f"  {name:<18} {value}" for name, value in rows]


def _packs(content: Mapping[str, Any]) -> str:
    used = content["num_tokens"] / max(content["num_packs"] * content["seq_length"], 1)
    return f"{_number(content['num_packs'])} of {content['seq_length']} tokens, {used:.1%} filled"


def _number(value: int) -> str:
    return f"{value:,}"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Names and values in two columns."""
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows]
