"""Running a program that a model has written: in a process of its own, with limits, in a folder that goes away.

The kernel enforces what is said here (Linux: seccomp, Landlock, resource limits), not Python: no network, no other
processes, no signals, no file changed outside the folder. Files that the user can read can be read.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import tempfile
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
    unprotected: tuple[str, ...] = ()
    """Protections that the kernel did not offer."""


class Refused(Exception):
    """The kernel cannot hold the program off from the network: it did not run."""


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
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, folder, str(seconds), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=folder,
            env={},
        )
        try:
            # A lone surrogate is no text that a file could hold; Python then refuses the program as it should.
            content = f"{word}\n{source}".encode("utf-8", "surrogatepass")
            output, _ = process.communicate(content, timeout=seconds * _CLOCK_PER_SECOND)
        except subprocess.TimeoutExpired:
            return Outcome(passed=False, reason="timed out")
        finally:
            process.kill()
            process.wait()
    return _outcome(output[:_MOST_READ], word, process.returncode)


def _outcome(output: bytes, word: str, code: int) -> Outcome:
    try:
        answer = json.loads(output)
    except ValueError:
        answer = None
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and answer is None):
        return Outcome(passed=False, reason="timed out")
    if not isinstance(answer, dict):
        # It left by itself (os._exit), was killed for its limits, or broke the interpreter.
        return Outcome(passed=False, reason=f"ended with {code} before its end")
    if "refused" in answer:
        raise Refused(answer["refused"])
    unprotected = tuple(answer.get("missing", ()))
    if answer.get("done") == word:
        return Outcome(passed=True, reason="", unprotected=unprotected)
    return Outcome(passed=False, reason=str(answer.get("error", "no reason given")), unprotected=unprotected)


def check_sandbox() -> tuple[str, ...]:
    """Try the sandbox with an empty program. Returns what it does not protect from, for a warning.

    Raises:
        UserError: it does not work on this machine.
    """
    try:
        outcome = run_program("")
    except Refused as error:
        raise UserError(
            f"--allow-code-execution: this machine cannot hold programs off from the network ({error}); programs that "
            "a model has written run on Linux with seccomp only. Leave the benchmark out here"
        ) from None
    if not outcome.passed:
        raise UserError(f"--allow-code-execution: an empty program does not run in the sandbox here: {outcome.reason}")
    return tuple(f"files outside its folder are not protected ({missing})" for missing in outcome.unprotected)
