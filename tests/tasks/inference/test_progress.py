"""How far a run is: lines in a file, a bar on a terminal."""

from __future__ import annotations

import logging

import pytest

from mindspeed_llm.tasks.inference import progress
from mindspeed_llm.tasks.inference.progress import Progress


def test_a_line_has_rates_and_the_time_that_is_left() -> None:
    found = Progress("answers", 8, show=False)
    found.add(30)
    found.add(10)
    assert found.line(4.0) == "2 of 8 answers (25%), 0.50/s, 10.0 tokens/s, ETA 0:00:12"
    found.add(100, items=6)
    assert found.line(10.0) == "8 of 8 answers (100%), 0.80/s, 14.0 tokens/s in 10.0 s"


def test_lines_come_from_time_to_time_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = iter([0.0, 4.0, 11.0, 12.0, 13.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(logging.getLogger("mindspeed_llm"), "propagate", True)
    shown = Progress("answers", 4, show_bar=False)
    with caplog.at_level(logging.INFO, logger="mindspeed_llm"):
        for _ in range(4):
            shown.add(1)
    assert [line.partition(" answers")[0] for line in caplog.messages] == ["2 of 4", "4 of 4"]


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Progress("answers", 2, show_bar=True)
    shown.add(5, items=2)
    shown.close()
    shown.close()
    assert "2/2" in capsys.readouterr().err
