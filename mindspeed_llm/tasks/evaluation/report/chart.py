"""Accuracies as bars with their standard errors, drawn as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_ROW, _LABEL, _BAR, _VALUE = 22, 290, 400, 200


def chart(subjects: Mapping[str, Mapping[str, Any]], earlier: Mapping[str, Mapping[str, Any]] | None) -> Iterator[str]:
    """A bar for each subject from 0 to 1, a whisker of one standard error to both sides, and a mark where the subject
    stood in the earlier evaluation.
    """
    height = _ROW * (len(subjects) + 1)
    yield f'<svg class="chart" viewBox="0 0 {_LABEL + _BAR + _VALUE} {height}" role="img" aria-label="accuracies">\n'
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = _LABEL + share * _BAR
        yield f'<line class="grid" x1="{x:g}" x2="{x:g}" y1="0" y2="{height - _ROW}"/>'
        yield f'<text class="axis" x="{x:g}" y="{height - 6}">{share:.0%}</text>\n'
    for place, (name, score) in enumerate(subjects.items()):
        old = (earlier or {}).get(name)
        yield from _bar(name, score, old, _ROW * place)
    yield "</svg>\n"


def _bar(name: str, score: Mapping[str, Any], old: Mapping[str, Any] | None, y: float) -> Iterator[str]:
    accuracy, stderr = score["accuracy"], score["stderr"]
    middle = y + _ROW / 2
    label = name if len(name) <= 36 else f"{name[:35]}…"
    spread = "" if stderr is None else f" ± {stderr:.3f}"
    told = f"{name}: {score['correct']} of {score['total']}{spread}"
    told += "" if old is None else f"; earlier {old['accuracy']:.3f}"
    yield f"<g><title>{escape(told)}</title>"
    yield f'<rect class="row" x="0" y="{y:g}" width="{_LABEL + _BAR + _VALUE}" height="{_ROW}"/>'
    yield f'<text class="name" x="{_LABEL - 8}" y="{middle + 4:g}">{escape(label)}</text>'
    yield f'<rect class="bar" x="{_LABEL}" y="{y + 4:g}" width="{accuracy * _BAR:.1f}" height="{_ROW - 8}"/>'
    if stderr:
        left, right = (_LABEL + min(max(accuracy + side, 0), 1) * _BAR for side in (-stderr, stderr))
        yield f'<path class="whisker" d="M{left:.1f} {middle - 4:g}v8m0 -4H{right:.1f}m0 -4v8"/>'
    if old is not None:
        x = _LABEL + old["accuracy"] * _BAR
        yield f'<path class="earlier" d="M{x:.1f} {y + 2:g}v{_ROW - 4}"/>'
    yield (
        f'<text class="value" x="{_LABEL + _BAR + 10}" y="{middle + 4:g}">{accuracy:.3f}{spread} '
        f"({score['correct']}/{score['total']})</text></g>\n"
    )
