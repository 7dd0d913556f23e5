"""What programs of a model can and cannot do."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.execution import sandbox
from mindspeed_llm.tasks.evaluation.execution.sandbox import check_sandbox, run_program
from mindspeed_llm.tasks.evaluation.execution.system_calls import ARCHITECTURES, filter_program

try:
    check_sandbox()
    IS_AVAILABLE = True
except UserError:
    IS_AVAILABLE = False

needs_sandbox = pytest.mark.skipif(not IS_AVAILABLE, reason="the kernel offers no seccomp or no Landlock")


@needs_sandbox
def test_what_a_program_may_do() -> None:
    program = """
import math, threading, os, json, random, numpy
found = []
thread = threading.Thread(target=lambda: found.append(math.gcd(12, 18)))
thread.start(); thread.join()
assert found == [6] and numpy.ones(3).sum() == 3
print("nobody reads this")
open(os.devnull, "w").write("nor this")
assert open(0).read() == "" and open(json.__file__).read()
"""
    assert run_program(program) == sandbox.Outcome(passed=True, reason="")


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import os; os._exit(0)", "ended with 0 before its end"),
        ("import ctypes; ctypes.string_at(0)", "ended with -11 before its end"),
        ("import os; os.fork()", "PermissionError"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', ''])", "PermissionError"),
        ("import os; os.execv('/bin/true', ['true'])", "PermissionError"),
        ("import os; os.kill(os.getppid(), 15)", "PermissionError"),
        ("import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", "PermissionError"),
        ("import os; os.sched_setaffinity(os.getppid(), {0})", "PermissionError"),
        ("import os; os.memfd_create('x')", "PermissionError"),
        ("x = 'a' * (3 << 30)", "MemoryError"),
        ("open('f', 'w')", "PermissionError"),
        ("import os; os.mkdir('d')", "PermissionError"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))", "ValueError"),
        # What it writes where it does not belong is read up to a limit.
        (
            "import os\nfor n in range(3, 60):\n  try:\n    while True: os.write(n, b'x' * 65536)\n  except OSError: 0",
            "ended",
        ),
        ("import os\nfor n in range(3, 60):\n  try: os.write(n, b'[' * 9999)\n  except OSError: 0", "ended with 0"),
    ],
)
def test_what_ends_a_program(program: str, reason: str) -> None:
    outcome = run_program(program)
    assert not outcome.passed
    assert outcome.reason.startswith(reason)


@needs_sandbox
def test_a_program_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_program("while True: pass", seconds=1).reason == "timed out"
    monkeypatch.setattr(sandbox, "_CLOCK_PER_SECOND", 1)
    assert run_program("import time; time.sleep(60)", seconds=1).reason == "timed out"


@needs_sandbox
@pytest.mark.parametrize(
    "block", ["import sys\n    sys.exit(0)", "int(input())", "import unittest\n    unittest.main()"]
)
def test_what_a_reply_does_as_a_script_is_no_part_of_it(block: str) -> None:
    """As where `exec` runs it with variables of its own, which is how the benchmark's judges do."""
    program = f"def double(n):\n    return 2 * n\n\nif __name__ == '__main__':\n    {block}\n\nassert double(2) == 4\n"
    exec(compile(program, "program", "exec"), {})
    assert run_program(program).passed


@needs_sandbox
def test_no_program_reaches_the_network() -> None:
    """The same program outside the sandbox does: the test would see it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]})).close()"
        subprocess.run([sys.executable, "-c", program], check=True)
        assert run_program(program).reason.startswith("PermissionError")


@needs_sandbox
def test_no_program_changes_files(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    kept.chmod(0o600)
    os.utime(kept, (1, 1))
    for program in (
        f"open({str(kept)!r}, 'w')",
        f"import os; os.remove({str(kept)!r})",
        f"import os; os.truncate({str(kept)!r}, 0)",
        f"import os; os.open({str(kept)!r}, os.O_RDONLY | os.O_TRUNC)",
        f"import os; os.open({str(kept)!r}, 3 | os.O_TRUNC)",
        f"import os; os.chmod({str(kept)!r}, 0o777)",
        f"import os; os.utime({str(kept)!r})",
        f"import os; os.rename({str(kept)!r}, 'mine')",
        f"import os; os.link({str(kept)!r}, {str(tmp_path / 'new')!r})",
        f"import os; os.mkdir({str(tmp_path / 'new')!r})",
    ):
        assert run_program(program).reason.startswith(("PermissionError", "OSError")), program
    assert kept.read_text() == "as it was"
    assert (kept.stat().st_mode & 0o777, kept.stat().st_mtime) == (0o600, 1)
    assert os.listdir(tmp_path) == ["kept"]


@needs_sandbox
def test_the_filter_alone_keeps_files_from_being_emptied(tmp_path: Path) -> None:
    """Early versions of Landlock let files be truncated."""
    kept = tmp_path / "kept"
    code = (
        "import os; from mindspeed_llm.tasks.evaluation.execution.confined import limit_system_calls\n"
        "limit_system_calls()\n"
        f"path = {str(kept)!r}\n"
        "for act, how in ((os.truncate, 0), (os.open, os.O_TRUNC), (os.open, 3 | os.O_TRUNC)):\n"
        "    try: act(path, how)\n"
        "    except PermissionError: print('denied')\n"
        f"os.close(os.open({str(kept)!r}, os.O_WRONLY | os.O_TRUNC))"
    )
    kept.write_text("x")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "denied\n" * 3
    assert kept.read_text() == ""  # what Landlock is for


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_filters_of_all_machines_are_whole(machine: str) -> None:
    program = filter_program(machine)
    assert len(program) < 4096  # BPF_MAXINSNS
    for place, (operation, where_true, where_false, _) in enumerate(program):
        if operation in (0x15, 0x35, 0x45):
            assert place + 1 + max(where_true, where_false) < len(program)
    assert program[-1][0] == 0x06
    assert platform.machine() in ARCHITECTURES or not IS_AVAILABLE


@needs_sandbox
def test_the_order_of_sets_is_the_same_in_each_run() -> None:
    found = {run_program("raise ValueError(list({'a', 'b', 'c', 'd', 'e'}))").reason for _ in range(4)}
    assert len(found) == 1


@needs_sandbox
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_program("x = 1")
    run_program("while True: pass", seconds=1)
    assert os.listdir(tmp_path) == []


def test_a_machine_without_protection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_outcome", lambda *_: (_ for _ in ()).throw(sandbox.Refused("Landlock: no")))
    with pytest.raises(UserError, match=r"--allow-code-execution: this machine cannot hold .*Landlock: no"):
        check_sandbox()
