"""Runs that are cut off leave nothing that looks whole, and the next run goes on or begins anew."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command import run as run_module
from mindspeed_llm.tasks.preprocess.command import workspace
from mindspeed_llm.tasks.preprocess.conversation_work import ConversationWork
from tests.tasks.preprocess.command.toys import RECORDS, SFT, contents, preprocess, started, summary, toys, write_jsonl

__all__ = ["toys"]
PACK = [*SFT, "--pack", "--seq-length", "150"]
SLOW = (
    "import time\n"
    "from mindspeed_llm.tasks.preprocess.command import run\n"
    "run.BATCH_RECORDS = 5\n"
    "from mindspeed_llm.tasks.preprocess.conversation_work import ConversationWork as Work\n"
    "call = Work.__call__\n"
    "Work.__call__ = lambda self, records: (time.sleep(0.05), call(self, records))[1]\n"
)


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.005)


def _group_is_gone(process: subprocess.Popen[str]) -> bool:
    """Whether no process of the group is left; a zombie of ours is none."""
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_an_interrupted_run_in_parts_goes_on(
    toys: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess(*PACK, prefix="out/whole")
    seen: list[int] = []
    call = ConversationWork.__call__

    def counted(self: ConversationWork, records: list[object]) -> object:
        # What --check would do, too: the first records are tried in every run.
        seen.append(len(records))
        if len(seen) == stop_at:
            raise KeyboardInterrupt
        return call(self, records)  # type: ignore[arg-type]

    monkeypatch.setattr(run_module, "BATCH_RECORDS", 5)
    monkeypatch.setattr(ConversationWork, "__call__", counted)
    argv = [*PACK, "--n-subs", "4"]
    stop_at = 9
    with pytest.raises(KeyboardInterrupt):
        preprocess(*argv)
    said = capsys.readouterr().out
    assert "finished parts stay in out/.data.preprocess; the same command goes on with them" in said
    assert sorted(path.name for path in (toys / "out").iterdir() if "data" in path.name) == [".data.preprocess"]
    # 20 tried, 7 batches of 5 done: two parts of 15 are finished.
    seen.clear()
    stop_at = 4
    with pytest.raises(KeyboardInterrupt):
        preprocess(*argv)
    assert "going on after 2 of 4 parts (30 records)" in capsys.readouterr().out
    seen.clear()
    stop_at = -1
    preprocess(*argv)
    assert "going on after 2 of 4 parts (30 records)" in capsys.readouterr().out
    assert seen == [20, *[5] * 6]
    assert contents(toys / "out") == contents(toys / "out", "whole")
    for key in ("num_records", "num_samples", "num_tokens", "num_targets", "length_histogram", "num_packs"):
        assert summary(toys / "out")[key] == summary(toys / "out", "whole")[key]
    assert not (toys / "out" / ".data.preprocess").exists()


@pytest.mark.parametrize("change", ["options", "inputs", "parts", "lost file"])
def test_parts_of_other_work_are_not_used(
    toys: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(run_module, "BATCH_RECORDS", 5)
    argv = [*SFT, "--n-subs", "4"]
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_check_result", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            preprocess(*argv)
    assert len(list((toys / "out" / ".data.preprocess").glob("part-*/summary.json"))) == 4
    if change == "options":
        argv += ["--mask-history", "--seq-length", "999"]
    elif change == "inputs":
        write_jsonl(toys / "alpaca.jsonl", [{**record, "output": "new"} for record in RECORDS])
    elif change == "parts":
        argv[-1] = "3"
    else:
        (toys / "out" / ".data.preprocess" / "part-00000" / "labels.idx").unlink()
    capsys.readouterr()
    preprocess(*argv)
    assert "going on" not in capsys.readouterr().out
    preprocess(*argv, prefix="out/whole")
    assert contents(toys / "out") == contents(toys / "out", "whole")


def test_an_interrupted_run_in_one_part_leaves_nothing(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preprocess(*SFT)
    before = contents(toys / "out")
    monkeypatch.setattr(run_module, "publish", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        preprocess(*SFT, "--max-samples", "7")
    # What stood there stands there still, as a whole.
    assert contents(toys / "out") == before and summary(toys / "out")["num_records"] == 60
    assert not [path for path in (toys / "out").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("parts", ["1", "6"])
def test_kill_in_the_middle_of_a_run(toys: Path, repository: Path, workers: str, parts: str) -> None:
    argv = [*PACK, "--n-subs", parts]
    preprocess(*argv, prefix="out/whole")
    work = toys / "out" / ".data.preprocess"
    common = ["--input", "alpaca.jsonl", "--output-prefix", "out/data", "--workers", workers]
    process = started(repository, toys, *argv, *common, patch=SLOW)
    number = "part-00000" if parts == "1" else "part-00003"
    _wait(lambda: bool(list(work.glob(f"{number}/.*"))), "a part that is being written")
    time.sleep(0.05)
    process.kill()
    process.communicate()
    _wait(lambda: _group_is_gone(process), "the end of its workers")
    assert work.is_dir() and contents(toys / "out") == {}
    preprocess(*argv)
    assert contents(toys / "out") == contents(toys / "out", "whole")
    assert not work.exists()


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number, code, words", [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "SIGTERM")])
def test_a_signal_ends_it_clean(
    toys: Path, repository: Path, workers: str, number: signal.Signals, code: int, words: str
) -> None:
    argv = ["--input", "alpaca.jsonl", *SFT, "--output-prefix", "out/data", "--workers", workers]
    process = started(repository, toys, *argv, patch=SLOW)
    _wait(lambda: bool(list((toys / "out").glob(".data.preprocess/part-00000/.*"))), "the beginning of the work")
    # As a terminal does it: to every process.
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code and errors.count("\n") == 1 and words in errors
    assert list((toys / "out").iterdir()) == []
    _wait(lambda: _group_is_gone(process), "the end of its workers")


ENDLESS = (
    "import time\n"
    "from mindspeed_llm.tasks.preprocess.command import run\n"
    "run.BATCH_RECORDS = 5\n"
    "from mindspeed_llm.tasks.preprocess.conversation_work import ConversationWork as Work\n"
    "call = Work.__call__\n"
    "def endless(self, records):\n"
    "    if len(records) == 5:\n"
    "        open('begun', 'w').close()\n"
    "        time.sleep(50)\n"
    "    return call(self, records)\n"
    "Work.__call__ = endless\n"
)
THREADS = (
    "from mindspeed_llm.tasks.preprocess.command.record_mistakes import CheckedWork\n"
    "CheckedWork.runs_in_threads = True\n"
)


@pytest.mark.parametrize("workers, patch", [("1", ""), ("2", ""), ("1", THREADS), ("2", THREADS)])
def test_a_signal_while_the_first_batch_is_worked_on(toys: Path, repository: Path, workers: str, patch: str) -> None:
    argv = ["--input", "alpaca.jsonl", *SFT, "--output-prefix", "out/data", "--workers", workers]
    process = started(repository, toys, *argv, patch=ENDLESS + patch)
    _wait((toys / "begun").exists, "the first batch")
    start = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    # Not the 50 seconds of the batch.
    assert time.monotonic() - start < 10
    assert process.returncode == 143 and errors == "ended by SIGTERM\n"
    assert list((toys / "out").iterdir()) == []
    _wait(lambda: _group_is_gone(process), "the end of its workers")


def test_two_runs_at_once(toys: Path, repository: Path) -> None:
    argv = ["--input", "alpaca.jsonl", *SFT, "--output-prefix", "out/data"]
    process = started(repository, toys, *argv, patch=SLOW)
    _wait(lambda: (toys / "out" / ".data.preprocess" / "work.json").exists(), "the first run")
    with pytest.raises(UserError, match=rf"out/data: another run is writing it \(process {process.pid} on "):
        preprocess(*SFT, "--max-samples", "3")
    preprocess(*SFT, prefix="out/other")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert contents(toys / "out") == contents(toys / "out", "other")


def test_an_input_that_changes_under_the_work(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = workspace.Workspace.begin

    def append(self: workspace.Workspace, note: dict[str, object]) -> None:
        begin(self, note)
        with (toys / "alpaca.jsonl").open("a") as stream:
            stream.write('{"instruction": "late", "output": "x"}\n')

    monkeypatch.setattr(workspace.Workspace, "begin", append)
    with pytest.raises(UserError, match=r"alpaca\.jsonl has changed while it was read"):
        preprocess(*SFT)
    assert list((toys / "out").iterdir()) == []
