"""Lines of progress against arithmetic by hand."""

import logging
from collections.abc import Iterator

import pytest

from mindspeed_llm.tasks.preprocess.chunks import Summary
from mindspeed_llm.tasks.preprocess.command import progress
from mindspeed_llm.tasks.preprocess.command.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    yield now


@pytest.mark.usefixtures("clock")
def test_a_line_by_hand() -> None:
    bar = Progress("data", total=2000, interval=100, done=Summary(num_records=500, num_tokens=1000), show_bar=False)
    # 250 records and 9 million tokens in 5 s are new; 1250 records are left.
    line = bar.line(Summary(num_records=750, num_tokens=9_001_000), 5.0)
    assert line == "data: 750 records of about 2000 (38%), 50 records/s, 1.80 M tokens/s, ETA 0:00:25"
    unknown = Progress("data", total=None, interval=100, done=Summary(), show_bar=False)
    assert unknown.line(Summary(num_records=10, num_tokens=30), 1.0) == "data: 10 records, 10 records/s, 30 tokens/s"
    # An estimate may be too low.
    assert "of about 2000 (100%)" in bar.line(Summary(num_records=2100), 1.0)


def test_how_often(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    bar = Progress("data", total=None, interval=100, done=Summary(), show_bar=False)
    with caplog.at_level(logging.INFO, logger="mindspeed_llm"):
        for records in (99, 100, 150, 199, 250, 1000, 1001):
            clock[0] += 0.6
            bar.update(Summary(num_records=records))
    # 99 is no hundred, 150 and 199 hold no new one, and 1000 comes only 0.6 s after the line before.
    assert [line.split(" records")[0] for line in caplog.messages] == ["data: 100", "data: 250", "data: 1001"]


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress("data", total=20, interval=1, done=Summary(), show_bar=True)
    bar.update(Summary(num_records=15, num_tokens=30))
    bar.close()
    bar.close()
    shown = capsys.readouterr().err
    assert "data" in shown and "15/20" in shown and "tokens/s" in shown
