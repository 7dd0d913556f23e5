"""What programs of a model can and cannot do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.execution import sandbox
from mindspeed_llm.tasks.evaluation.execution.sandbox import check_sandbox, run_program

try:
    UNPROTECTED: tuple[str, ...] | None = check_sandbox()
except UserError:
    UNPROTECTED = None

needs_sandbox = pytest.mark.skipif(UNPROTECTED is None, reason="the kernel offers no seccomp")
needs_landlock = pytest.mark.skipif(bool(UNPROTECTED is None or UNPROTECTED), reason="the kernel offers no Landlock")


@needs_sandbox
def test_what_a_program_may_do() -> None:
    program = """
import math, threading, os, tempfile
found = []
thread = threading.Thread(target=lambda: found.append(math.gcd(12, 18)))
thread.start(); thread.join()
assert found == [6]
open("a", "w").write("x"); os.mkdir("d"); os.rename("a", "d/a"); os.remove("d/a")
print("nobody reads this")
assert open(0).read() == ""
"""
    assert run_program(program) == sandbox.Outcome(passed=True, reason="", unprotected=UNPROTECTED_KERNEL)


UNPROTECTED_KERNEL = run_program("").unprotected if UNPROTECTED is not None else ()


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
        ("x = 'a' * (3 << 30)", "MemoryError"),
        ("open('f', 'wb').write(b'x' * (20 << 20))", "OSError"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))", "ValueError"),
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
def test_no_program_reaches_the_network() -> None:
    """The same program outside the sandbox does: the test would see it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]})).close()"
        subprocess.run([sys.executable, "-c", program], check=True)
        assert run_program(program).reason.startswith("PermissionError")


@needs_landlock
def test_no_program_changes_files_outside_its_folder(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    kept.chmod(0o600)
    for program in (
        f"open({str(kept)!r}, 'w')",
        f"import os; os.remove({str(kept)!r})",
        f"import os; os.truncate({str(kept)!r}, 0)",
        f"import os; os.chmod({str(kept)!r}, 0o777)",
        f"import os; os.rename({str(kept)!r}, 'mine')",
        f"import os; os.mkdir({str(tmp_path / 'new')!r})",
    ):
        assert run_program(program).reason.startswith(("PermissionError", "OSError")), program
    assert kept.read_text() == "as it was"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["kept"]


@needs_sandbox
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_program("open('left', 'w').write('x')")
    run_program("while True: open('left', 'w').write('x')", seconds=1)
    assert os.listdir(tmp_path) == []


def test_a_machine_without_seccomp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_outcome", lambda *_: (_ for _ in ()).throw(sandbox.Refused("seccomp: no")))
    with pytest.raises(UserError, match=r"--allow-code-execution: this machine cannot hold .*seccomp: no"):
        check_sandbox()
