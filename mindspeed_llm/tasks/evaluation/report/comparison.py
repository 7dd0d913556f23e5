"""Two evaluations beside each other: is the difference more than chance?"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError

Key = tuple[str, str, int]
"""Task, subject, index."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One task in both evaluations, by its headline metric."""

    task: str
    metric: str
    earlier: float
    """Accuracies, 0 to 1."""
    later: float
    p_value: float | None
    """How likely a difference of this size, or more, would be if there were none; None where that cannot be said."""
    test: str
    """How it was found, for people."""
    better: int | None = None
    """Samples that are right now and were wrong; None where the samples are not paired."""
    worse: int | None = None
    notes: tuple[str, ...] = ()
    """Why the two may not be about the same thing."""


def sign_test(better: int, worse: int) -> float:
    """McNemar's exact test: the two-sided probability of so uneven a split of better + worse fair coins.

    McNemar 1947; the binomial form of it, which holds for few samples as well.
    """
    changed = better + worse
    tail = sum(math.comb(changed, number) for number in range(min(better, worse) + 1))
    return float(min(1.0, tail / 2 ** (changed - 1))) if changed else 1.0


def difference_test(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> float | None:
    """The two-sided probability of the difference of two independent accuracies, by their standard errors (z test);
    None where there are none.
    """
    if earlier["stderr"] is None or later["stderr"] is None:
        return None
    difference = later["accuracy"] - earlier["accuracy"]
    spread = math.hypot(earlier["stderr"], later["stderr"])
    if not spread:
        return None if difference else 1.0
    return math.erfc(abs(difference) / spread / math.sqrt(2))


def compare(
    results: Mapping[str, Any],
    samples: Iterable[Mapping[str, Any]],
    earlier: Mapping[str, Any],
    earlier_samples: Iterable[Mapping[str, Any]] | None,
) -> tuple[list[Comparison], dict[Key, bool]]:
    """The tasks that both evaluations have, and the earlier verdicts on the samples that both have.

    Samples are paired by task, subject and index, where both were asked the same; without pairs, or where some lack
    one, the scores are compared as those of independent samples.

    Args:
        results: what results.json holds.
        samples: the rows of samples.jsonl.
        earlier: results.json of the earlier evaluation.
        earlier_samples: its samples.jsonl; None: there is none.
    """
    before = {_key(row): row for row in earlier_samples or () if row["task"] in results["results"]}
    pairs: dict[str, list[tuple[bool, bool]]] = {}
    verdicts: dict[Key, bool] = {}
    for row in samples:
        task = row["task"]
        old = before.get(_key(row))
        if task not in earlier["results"] or old is None or old["prompt"] != row["prompt"]:
            continue
        metric = results["results"][task]["metric"]
        if metric in old["correct"] and metric in row["correct"]:
            verdicts[_key(row)] = old["correct"][metric]
            pairs.setdefault(task, []).append((old["correct"][metric], row["correct"][metric]))
    return [
        _task(task, results, earlier, pairs.get(task, [])) for task in results["results"] if task in earlier["results"]
    ], verdicts


def _key(row: Mapping[str, Any]) -> Key:
    return row["task"], row["subject"], row["index"]


def _task(
    task: str, results: Mapping[str, Any], earlier: Mapping[str, Any], pairs: list[tuple[bool, bool]]
) -> Comparison:
    now, then = results["results"][task], earlier["results"][task]
    notes = _notes(results["tasks"].get(task, {}), earlier.get("tasks", {}).get(task, {}))
    if now["metric"] != then["metric"]:
        notes += (f"the earlier headline is {then['metric']}",)
        then = then.get("metrics", {}).get(now["metric"], then)
    better = sum(new and not old for old, new in pairs)
    worse = sum(old and not new for old, new in pairs)
    is_paired = len(pairs) == now["total"] == then["total"]
    return Comparison(
        task=task,
        metric=now["metric"],
        earlier=then["accuracy"],
        later=now["accuracy"],
        p_value=sign_test(better, worse) if is_paired else difference_test(then, now),
        test=(
            f"sign test on {better + worse} samples whose verdict has changed"
            if is_paired
            else "z test, as if the samples were others"
        ),
        better=better if is_paired else None,
        worse=worse if is_paired else None,
        notes=notes,
    )


_SAME = {
    "version": "another version of the task",
    "variant": "another way of asking",
    "language": "prompts in another language",
    "num_fewshot": "another number of examples",
    "data_hash": "other data",
    "prompts_hash": "other prompts",
}


def _notes(now: Mapping[str, Any], then: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(text for name, text in _SAME.items() if now.get(name) != then.get(name))


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a samples.jsonl. Raises UserError: it is none."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                row = json.loads(line)
                if not _is_sample(row):
                    raise UserError(
                        f"--compare: {path}, line {number} is no sample of an evaluation; move the file away to "
                        "compare scores alone"
                    )
                yield row
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--compare: {path} cannot be read ({error}); move it away to compare scores alone") from error


def _is_sample(row: Any) -> bool:
    """Whether a row has all that a comparison uses."""
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(name), str) for name in ("task", "subject", "prompt"))
        and type(row.get("index")) is int
        and isinstance(row.get("correct"), dict)
        and all(isinstance(verdict, bool) for verdict in row["correct"].values())
    )
