"""`report.html`: scores as charts, what they rest on, and samples to filter; one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from mindspeed_llm.files import write_durably
from mindspeed_llm.tasks.evaluation.report.chart import chart
from mindspeed_llm.tasks.evaluation.report.comparison import Comparison, Key, compare, read_samples
from mindspeed_llm.tasks.evaluation.report.page_style import SCRIPT, STYLE
from mindspeed_llm.tasks.evaluation.report.samples import as_data, packed

_LEVEL = 0.05


def write_report(
    results: Mapping[str, Any],
    samples: Iterable[Mapping[str, Any]],
    path: Path,
    earlier: Mapping[str, Any] | None = None,
) -> None:
    """Write the page under a temporary name, then publish it.

    Args:
        results: what results.json holds.
        samples: the rows of samples.jsonl.
        path: the page.
        earlier: what the results.json of an evaluation to compare with holds, and under `samples_path` where its
            samples are; None: there is none.

    Raises:
        UserError: the earlier samples cannot be read.
        OSError: the page cannot be written.
    """
    rows = list(samples)
    comparisons: list[Comparison] = []
    verdicts: dict[Key, bool] = {}
    if earlier is not None:
        before = read_samples(Path(earlier["samples_path"])) if "samples_path" in earlier else None
        comparisons, verdicts = compare(results, rows, earlier, before)
    metrics = {task: score["metric"] for task, score in results["results"].items()}
    data = as_data(packed(rows, metrics, verdicts))
    write_durably(path, "".join(_page(results, comparisons, earlier, data)), through_links=True)


def _page(
    results: Mapping[str, Any], comparisons: list[Comparison], earlier: Mapping[str, Any] | None, data: str
) -> Iterator[str]:
    # Nothing of the data can act in the page: all of it is escaped, and only our script may run.
    script_hash = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'; img-src data:"
    yield (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>Evaluation</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
    )
    yield f'<h1>Evaluation</h1>\n<p class="dim">{escape(str(results["model"]["description"]))}</p>\n'
    yield from _summary(results, {found.task: found for found in comparisons})
    for task, score in results["results"].items():
        yield f"<h2>{escape(task)} <small class='dim'>{escape(score['metric'])}</small></h2>\n"
        for warning in score.get("warnings", ()):
            yield f'<p class="warning">{escape(warning)}</p>\n'
        old = None if earlier is None else earlier["results"].get(task)
        if old is not None:
            yield '<p class="dim"><span class="mark"></span> the earlier evaluation</p>\n'
        yield from chart(score["subjects"], None if old is None else old.get("subjects"))
    yield from _samples(bool(comparisons))
    yield from _origin(results)
    yield f'<script type="application/json" id="data">{data}</script>\n<script>{SCRIPT}</script>\n</body>\n</html>\n'


def _number(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)


def _summary(results: Mapping[str, Any], comparisons: Mapping[str, Comparison]) -> Iterator[str]:
    names = ["task", "metric", "accuracy", "standard error", "right", "of"]
    yield f"<table>\n<tr>{''.join(f'<th>{name}</th>' for name in names)}"
    yield "<th>earlier</th><th>difference</th><th>p</th><th></th></tr>\n" if comparisons else "</tr>\n"
    for task, score in results["results"].items():
        for metric, found in sorted(score["metrics"].items(), key=lambda item: item[0] != score["metric"]):
            first = f"<b>{escape(task)}</b>" if metric == score["metric"] else ""
            yield f"<tr><td>{first}</td><td>{escape(metric)}</td>"
            for text in (
                _number(found["accuracy"]),
                _number(found["stderr"]),
                str(found["correct"]),
                str(found["total"]),
            ):
                yield f'<td class="number">{text}</td>'
            if comparisons:
                yield from _difference(comparisons.get(task) if metric == score["metric"] else None)
            yield "</tr>\n"
    yield "</table>\n"


def _difference(found: Comparison | None) -> Iterator[str]:
    if found is None:
        yield "<td></td><td></td><td></td><td></td>"
        return
    difference = found.later - found.earlier
    clear = found.p_value is not None and found.p_value < _LEVEL
    kind = ("up" if difference > 0 else "down") if clear else "dim"
    said = found.test + ("" if found.better is None else f": {found.better} better, {found.worse} worse")
    said += "" if clear else "; may be chance"
    notes = "".join(f"; {note}" for note in found.notes)
    yield f'<td class="number">{found.earlier:.3f}</td><td class="number {kind}">{difference:+.3f}</td>'
    yield f'<td class="number">{_number(found.p_value, ".3g")}</td><td class="dim">{escape(said + notes)}</td>'


def _samples(is_compared: bool) -> Iterator[str]:
    verdicts = {"right": "right", "wrong": "wrong", "tie": "all choices equal", "cut": "beginning cut"}
    if is_compared:
        verdicts |= {"better": "right, was wrong", "worse": "wrong, was right"}
    choices = "".join(f'<option value="{value}">{text}</option>' for value, text in verdicts.items())
    legend = "▲ right now and wrong in the earlier evaluation, ▼ the other way round" if is_compared else ""
    yield (
        '<h2 id="samples">Samples</h2>\n<noscript><p class="warning">Samples are shown by a script, which this browser '
        'does not run; samples.jsonl has them all.</p></noscript>\n<div class="filters">'
        '<select id="task" aria-label="task"></select><select id="subject" aria-label="subject"></select>'
        f'<select id="verdict" aria-label="verdict"><option value="">all verdicts</option>{choices}</select>'
        '<input id="text" type="search" placeholder="words in question or answer" aria-label="search"></div>\n'
        f'<p class="dim"><span id="count"></span> {legend}</p>\n<div id="list"></div>\n'
        '<p><button id="back">Back</button> <span id="place" class="dim"></span> <button id="next">Next</button></p>\n'
    )


def _origin(results: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>What this rests on</h2>\n<table>\n"
    rows: list[tuple[str, object]] = [(f"model: {name}", value) for name, value in results["model"].items()]
    for task, facts in results["tasks"].items():
        rows += [(f"{task}: {name}", value) for name, value in facts.items()]
    for name, value in results["flags"].items():
        words = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
        rows.append((f"flag: --{name.replace('_', '-')}", words))
    rows += [(f"version: {name}", value) for name, value in results["versions"].items()]
    for name, value in rows:
        if value is not None:
            yield f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>\n"
    yield "</table>\n"
