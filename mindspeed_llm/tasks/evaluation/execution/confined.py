"""The process in which a program written by a model runs. Needs the standard library only, and starts in no time.

`main`, with SECONDS BYTES as arguments of the process, reads from its input one line, the word that reports
success, and then the program; it writes one line of JSON to its output: `{"done": word}`, or `{"error": text}`. The
program itself has no output and no input. The word tells a program that ran to its end from one that left before; a
program that wants to cheat can find it.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys

from mindspeed_llm.tasks.evaluation.execution.system_calls import filter_program

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_SECCOMP_MODE_FILTER = 2
# asm-generic numbers, the same on x86_64 and aarch64
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_OPEN_FILES = 64

# linux/landlock.h: what changes files, by the version of the interface that knows it
_WRITES_FROM_VERSION = {1: (1, 4, 5, 6, 7, 8, 9, 10, 11, 12), 2: (13,), 3: (14,)}
_WRITE_FILE = 1 << 1


class NotAvailable(Exception):
    """The kernel does not offer a protection."""


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise NotAvailable(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def limit_resources(seconds: int, memory: int) -> None:
    """Limits of processor time (seconds), memory (bytes), size and number of open files."""
    for which, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(which, (value, value))


def forbid_writing() -> None:
    """No file can be made, changed or removed (Landlock). Raises NotAvailable."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = _checked(libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, 1), "Landlock")
    bits = [bit for known, group in _WRITES_FROM_VERSION.items() if known <= version for bit in group]
    access = sum(1 << bit for bit in bits)
    handled = struct.pack("<Q", access)
    ruleset = _checked(libc.syscall(_LANDLOCK_CREATE_RULESET, handled, len(handled), 0), "Landlock")
    parent = os.open(os.devnull, os.O_PATH | os.O_CLOEXEC)
    _checked(libc.syscall(_LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("<Qi", _WRITE_FILE, parent), 0), "Landlock")
    os.close(parent)
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _checked(libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


def limit_system_calls() -> None:
    """No network, no other processes, no signals to them, no new limits (seccomp). Raises NotAvailable."""
    machine = platform.machine()
    try:
        instructions = filter_program(machine)
    except ValueError:
        raise NotAvailable(f"seccomp: the system calls of {machine} are not known here") from None
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("<HxxxxxxQ", len(instructions), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _checked(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "seccomp")


def _describe(error: BaseException) -> str:
    # A program may raise what cannot even be printed.
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}"[:200] if text else type(error).__name__


def main() -> None:
    """See the module."""
    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    word = sys.stdin.readline().strip()
    source = sys.stdin.read()
    # The answer leaves by a copy of the output that the program does not know; what it prints itself goes nowhere.
    answer = os.dup(1)
    for number in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)

    def reply(text: dict[str, object]) -> None:
        os.write(answer, json.dumps(text).encode() + b"\n")
        os._exit(0)

    try:
        forbid_writing()
        limit_resources(seconds, memory)
        limit_system_calls()
    except NotAvailable as error:
        reply({"refused": str(error)})
    del sys.argv[1:]
    try:
        # Not as a script: what a reply does `if __name__ == "__main__"` is no part of its answer.
        exec(compile(source, "program", "exec"), {})
    except BaseException as error:
        reply({"error": _describe(error)})
    reply({"done": word})
