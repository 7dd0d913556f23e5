"""The report as a browser takes it."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mindspeed_llm.tasks.evaluation.report import write_report
from mindspeed_llm.tasks.evaluation.report.page_style import SCRIPT
from tests.tasks.evaluation.report.results import HOSTILE, made_up


class Page(HTMLParser):
    """The parts of a page by what a browser makes of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self._open, []).append(data)


def _write(folder: Path, *, compared: bool) -> Path:
    results, samples = made_up(1, skill=0.8)
    earlier = None
    if compared:
        earlier, old = made_up(2, skill=0.4)
        earlier["samples_path"] = str(folder / "old.jsonl")
        (folder / "old.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    path = folder / "report.html"
    write_report(results, iter(samples), path, earlier)
    return path


def test_the_page_needs_nothing_else_and_runs_our_script_alone(tmp_path: Path) -> None:
    page = Page(_write(tmp_path, compared=False).read_text(encoding="utf-8"))
    assert [attributes.get("type") for tag, attributes in page.tags if tag == "script"] == ["application/json", None]
    assert not [
        attributes for _, attributes in page.tags if "src" in attributes or "http" in str(attributes.get("href"))
    ]
    script = [text for text in page.text["script"] if text.strip()][-1]
    assert script == SCRIPT
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv"))
    assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in str(policy)


def test_samples_arrive_whole(tmp_path: Path) -> None:
    path = _write(tmp_path, compared=True)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert data
    groups = json.loads(data[1])
    _, samples = made_up(1, skill=0.8)
    _, old = made_up(2, skill=0.4)
    found = [
        (group["task"], group["subject"], row["index"], group["begin"] + row["rest"], row["ok"], row["was"])
        for group in groups
        for row in group["rows"]
    ]
    headline = {"mmlu": "acc", "gsm8k": "flexible"}
    assert found == [
        (row["task"], row["subject"], row["index"], row["prompt"])
        + tuple(each["correct"][headline[row["task"]]] for each in (row, before))
        for row, before in zip(samples, old, strict=True)
    ]
    # The shots of a subject are there once.
    assert groups[0]["begin"] == "Shots of subject 0\n\n"
    assert groups[-1]["rows"][3]["raw"].endswith(HOSTILE.replace("\ud800", "?"))
    assert groups[0]["rows"][0]["raw"][0] < -1e308


def test_scores_and_charts(tmp_path: Path) -> None:
    text = _write(tmp_path, compared=True).read_text(encoding="utf-8")
    results, _ = made_up(1, skill=0.8)
    mmlu = results["results"]["mmlu"]
    assert f'<td class="number">{mmlu["accuracy"]:.3f}</td><td class="number">{mmlu["stderr"]:.3f}</td>' in text
    assert text.count("<svg") == 2 and text.count('class="bar"') == 6 and text.count('class="earlier"') == 6
    assert text.count("the earlier evaluation</p>") == 2 and "▼ the other way round" in text
    first = mmlu["subjects"]["subject_0"]
    assert f'width="{first["accuracy"] * 400:.1f}"' in text
    assert "all choices were equally likely &lt;b&gt;." in text
    assert "./model &lt;x&gt;" in text


def test_a_task_that_is_new_has_nothing_to_compare_with(tmp_path: Path) -> None:
    results, samples = made_up(1)
    earlier = copy.deepcopy(results)
    del earlier["results"]["mmlu"], earlier["tasks"]["mmlu"]
    write_report(results, samples, tmp_path / "report.html", earlier)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count("z test, as if the samples were others; may be chance") == 1


_CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(_CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("", "90 of 90 samples"),
        ("#task=gsm8k", "30 of 90 samples"),
        ("#task=mmlu&subject=subject_2", "12 of 90 samples"),
        ("#verdict=tie", "1 of 90 samples"),
        ("#text=what+is+17", "1 of 90 samples"),
        ("#task=gsm8k&text=DOCUMENT.title", "1 of 90 samples"),
    ],
)
def test_a_browser_filters_samples_and_reports_no_error(tmp_path: Path, address: str, said: str) -> None:
    path = _write(tmp_path, compared=True)
    quiet = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    done = subprocess.run(
        [str(_CHROMIUM), *quiet.split(), f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--v=0"]
        + ["--virtual-time-budget=2000", "--dump-dom", f"file://{path}{address}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert said in done.stdout
    assert "<title>Evaluation</title>" in done.stdout
    assert "CONSOLE" not in done.stderr
