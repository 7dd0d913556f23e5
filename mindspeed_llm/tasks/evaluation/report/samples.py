"""Samples for the page's script: what all prompts of a subject begin with is there once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed_llm.tasks.evaluation.report.comparison import Key


def packed(
    samples: Iterable[Mapping[str, Any]], metrics: Mapping[str, str], earlier: Mapping[Key, bool]
) -> list[dict[str, Any]]:
    """One group for each task and subject, in the order of the samples: `task`, `subject`, `metric`, `begin` (of all
    its prompts), and `rows` with `index`, `rest` (of the prompt), `raw`, `choices`, `extracted`, `gold`, `correct`,
    `ok` (by the headline metric), `tie`, `cut`, `was` (verdict of the earlier evaluation, null: none).
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for sample in samples:
        groups.setdefault((sample["task"], sample["subject"]), []).append(sample)
    found = []
    for (task, subject), rows in groups.items():
        begin = _beginning([row["prompt"] for row in rows])
        metric = metrics[task]
        found.append(
            {
                "task": task,
                "subject": subject,
                "metric": metric,
                "begin": begin,
                "rows": [
                    {
                        "index": row["index"],
                        "rest": row["prompt"][len(begin) :],
                        "raw": row["raw"] if isinstance(row["raw"], str) else [_finite(n) for n in row["raw"]],
                        "choices": row.get("choices"),
                        "extracted": row["extracted"],
                        "gold": row["gold"],
                        "correct": row["correct"],
                        "ok": row["correct"].get(metric, False),
                        "tie": row.get("is_tie", False),
                        "cut": row.get("cut_tokens", 0),
                        "was": earlier.get((task, subject, row["index"])),
                    }
                    for row in rows
                ],
            }
        )
    return found


def _beginning(texts: list[str]) -> str:
    """What all texts begin with, up to the end of a line; of a single one nothing."""
    if len(texts) < 2:
        return ""
    first, last = min(texts), max(texts)
    same = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[: first.rfind("\n", 0, same) + 1]


def _finite(value: float) -> float:
    """The number, or the nearest that JSON has."""
    return max(min(value, sys.float_info.max), -sys.float_info.max)


def as_data(value: object) -> str:
    """JSON that may stand in a page's script element: nothing in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate is no UTF-8.
    text = text.encode("utf-8", "replace").decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
