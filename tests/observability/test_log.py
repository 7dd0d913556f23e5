"""The format of log lines, which ranks show what, and the redirection for a progress bar."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_llm.observability import log
from mindspeed_llm.observability.progress import ProgressBar


@pytest.fixture(autouse=True)
def _restore():
    logger = logging.getLogger("mindspeed_llm")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before
    logger.setLevel(before[1])


def test_a_line_has_level_time_and_message(capsys: pytest.CaptureFixture) -> None:
    log.setup_logging(0)
    log.get_logger().info("loading %s", "weights")
    log.get_logger("data").warning("careful")
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"INFO \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] >> loading weights", first)
    assert re.fullmatch(r"WARNING \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] >> careful", second)


@pytest.mark.parametrize(("rank", "shown"), [("0", ["info", "warning"]), ("3", ["warning"])])
def test_other_ranks_show_warnings_only(
    rank: str, shown: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    log.setup_logging()
    log.setup_logging()  # a second call does not double the lines
    log.get_logger().info("info")
    log.get_logger().warning("warning")
    assert [line.split(">> ")[1] for line in capsys.readouterr().out.splitlines()] == shown


def test_a_bar_puts_log_lines_above_itself(capsys: pytest.CaptureFixture) -> None:
    log.setup_logging(0)
    bar = ProgressBar(total_steps=10, start_step=4, show=True)
    bar.update(7, loss=2.5)
    log.get_logger().info("between")
    bar.close()
    bar.close()
    log.get_logger().info("after")
    captured = capsys.readouterr()
    assert [line.split(">> ")[-1] for line in captured.out.splitlines() if line.strip()] == ["between", "after"]
    assert "7/10" in captured.err and "loss 2.5000" in captured.err


def test_no_bar_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    bar = ProgressBar(total_steps=10)
    bar.update(1, loss=1.0)
    bar.close()
    import sys

    assert sys.stderr.getvalue() == ""


def test_a_reader_that_has_gone_is_reported_once(repository: Path) -> None:
    """As with `train_fsdp2.py ... | head -1`: the process goes on, says so in one line, and ends with its own code."""
    code = (
        "import sys, time\n"
        "from mindspeed_llm.observability.log import get_logger, setup_logging\n"
        "setup_logging()\n"
        "sys.stdin.readline()\n"
        "for number in range(5):\n    get_logger().info('line %d', number)\n"
        "print('done', file=sys.stderr)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=repository,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.write("go\n")
    process.stdin.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 0
    assert err.splitlines() == [
        "log lines cannot be written to stdout ([Errno 32] Broken pipe); the run goes on",
        "done",
    ]


def test_a_full_disk_is_reported_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    log.setup_logging(0)
    monkeypatch.setattr("sys.stdout", Full())
    for _ in range(3):
        log.get_logger().info("a line")
    assert capsys.readouterr().err.count("No space left on device") == 1
