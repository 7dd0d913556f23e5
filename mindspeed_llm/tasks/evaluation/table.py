"""Scores on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_llm.tasks.evaluation.judge import BenchmarkResult
from mindspeed_llm.tasks.evaluation.scores import Score

TOTAL = "total"
ACCURACY = "acc"


def table(result: BenchmarkResult) -> str:
    """A line for each subject and one for all: questions, right ones, accuracy with its standard error, other metrics.

    subject   question_n   correct  acc(letter)   stderr   get_response
    anatomy           10         5       0.5000   0.1667         0.4000
    total             20        10       0.5000   0.1179         0.4500
    """
    others = [metric for metric in result.total if metric != result.headline]
    # The accuracy is called acc, as scripts look for it; another metric may have that very name.
    accuracy = ACCURACY if result.headline == ACCURACY else f"{ACCURACY}({result.headline})"
    rows = [["subject", "question_n", "correct", accuracy, "stderr", *others]]
    rows += [_row(subject, scores, result.headline, others) for subject, scores in result.subjects.items()]
    rows.append(_row(TOTAL, result.total, result.headline, others))
    return f"{result.name} ({result.headline})\n{_aligned(rows)}"


def _row(name: str, scores: Mapping[str, Score], headline: str, others: Sequence[str]) -> list[str]:
    score = scores[headline]
    return [
        name,
        str(score.total),
        str(score.correct),
        f"{score.accuracy:.4f}",
        "-" if score.stderr is None else f"{score.stderr:.4f}",
        *(f"{scores[metric].accuracy:.4f}" if metric in scores else "-" for metric in others),
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def summary_line(result: BenchmarkResult) -> str:
    """The line that scripts look for: `<name> acc = correct/total=ratio`, and behind it the metric, where that is
    another than acc.
    """
    score = result.total[result.headline]
    metric = "" if result.headline == ACCURACY else f" ({result.headline})"
    return f"{result.name} {ACCURACY} = {score.correct}/{score.total}={score.accuracy}{metric}"
