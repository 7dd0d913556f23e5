"""Running a program that a model has written: in a process of its own, held off from the machine.

The kernel enforces what is said here (Linux: seccomp, Landlock, resource limits), not Python: no network, no other
processes, no signals, no file made, changed or removed, limits of time and memory. Files that the user can read can be
read.
"""

from __future__ import annotations

import json
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.errors import UserError

_START = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[4])!r}); "
    "from mindspeed_llm.tasks.evaluation.execution.confined import main; del sys.path[0]; main()"
)
_MEMORY = 2 << 30
_MOST_READ = 1 << 16
_CLOCK_PER_SECOND = 6
"""The verdict on a program that computes does not depend on what else the machine does; one that waits ends as well."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended."""

    passed: bool
    """Whether it ran to its end without an exception."""
    reason: str
    """Why not: the exception, or "timed out", or how the process died; "" where it passed."""


class Refused(Exception):
    """The kernel cannot hold the program off: it did not run."""


def run_program(source: str, *, seconds: int = 10, memory: int = _MEMORY) -> Outcome:
    """Run a program.

    Args:
        source: Python, as a text.
        seconds: of the processor that it may take; six times as long on the clock.
        memory: bytes of address space.

    Raises:
        Refused: it did not run, since the kernel lacks a protection that is needed.
    """
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="program-") as folder, tempfile.TemporaryFile() as given:
        # A lone surrogate is no text that a file could hold; Python then refuses the program as it should.
        given.write(f"{word}\n{source}".encode("utf-8", "surrogatepass"))
        given.seek(0)
        process = subprocess.Popen(
            # -s: the packages of the installation, not those that the user has at home.
            [sys.executable, "-s", "-c", _START, str(seconds), str(memory)],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=folder,
            # The order of sets is the same in each run, and so is the verdict.
            env={"PYTHONHASHSEED": "0"},
        )
        try:
            output = _read(process, time.monotonic() + seconds * _CLOCK_PER_SECOND)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    return Outcome(passed=False, reason="timed out") if output is None else _outcome(output, word, process.returncode)


def _read(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """What the process writes until it ends, up to a limit; None where it does not end in time."""
    assert process.stdout is not None
    found = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(found) < _MOST_READ:
            if not selector.select(max(deadline - time.monotonic(), 0)):
                return None
            part = process.stdout.read1(_MOST_READ)  # type: ignore[union-attr]
            if not part:
                process.wait()
                return found
            found += part
    return found


def _outcome(output: bytes, word: str, code: int) -> Outcome:
    try:
        answer = json.loads(output)
    except (ValueError, RecursionError):
        answer = None
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and not output):
        return Outcome(passed=False, reason="timed out")
    if not isinstance(answer, dict):
        # It left by itself (os._exit), was killed for its limits, or broke the interpreter.
        return Outcome(passed=False, reason=f"ended with {code} before its end")
    if "refused" in answer:
        raise Refused(answer["refused"])
    if answer.get("done") == word:
        return Outcome(passed=True, reason="")
    return Outcome(passed=False, reason=str(answer.get("error", "no reason given"))[:200])


def check_sandbox() -> None:
    """Try the sandbox with an empty program.

    Raises:
        UserError: it does not work on this machine.
    """
    try:
        outcome = run_program("")
    except Refused as error:
        raise UserError(
            f"--allow-code-execution: this machine cannot hold programs off from network and files ({error}); programs "
            "that a model has written run on Linux from 5.13 on, with seccomp and Landlock. Leave the task out here"
        ) from None
    if not outcome.passed:
        raise UserError(f"--allow-code-execution: an empty program does not run in the sandbox here: {outcome.reason}")
