"""Runs the documentation's preprocess_data.py commands, each once, and what they read before them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.docs.pages import ROOT, Command

SCRIPTS = ("preprocess_data.py", "./preprocess_data.py")
# The result does not depend on it; a test needs no more.
MOST_WORKERS = 2


def preprocess_arguments(command: Command) -> list[str] | None:
    """The arguments of preprocess_data.py, or None when the command is another one."""
    match command.words:
        case ["python", script, *arguments] if script in SCRIPTS:
            return arguments
    return None


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """The value of a flag, None where it is not given."""
    return arguments[arguments.index(flag) + 1] if flag in arguments else None


class Preprocessed:
    """Runs commands in `folder`: in this process, or with several workers as a process of its own."""

    def __init__(self, folder: Path, commands: Sequence[Command], paths: dict[str, str]) -> None:
        """`paths` are absolute paths of the pages, and what stands for them in `folder`."""
        self.folder, self._paths = folder, paths
        self._commands = commands
        self._arguments = {command.text: preprocess_arguments(command) or [] for command in commands}
        self._printed: dict[str, str] = {}

    def run(self, command: Command) -> str:
        """Run a command, unless it has been run, after those whose output it reads; returns what it printed."""
        if command.text not in self._printed:
            self.provide(command.text)
            self._printed[command.text] = self._run(self._arguments[command.text])
        return self._printed[command.text]

    def provide(self, text: str) -> None:
        """Run the commands whose output `text`, a command or code, reads."""
        words = set(re.split(r"[\s\"',\[\]]+", text))
        for command in self._commands:
            arguments = self._arguments[command.text]
            prefix = value_of(arguments, "--output-prefix")
            if prefix is None or "--check" in arguments or command.text == text:
                continue
            # Inspection takes the prefix, training adds an ending, and parts are named by their folder.
            read = {prefix, f"{prefix}_text_document"} if "--output-prefix" not in words else set()
            if "--merge-group-keys" in words:
                read.add(str(Path(prefix).parent))
            if read & words:
                self.run(command)

    def _run(self, arguments: Sequence[str]) -> str:
        arguments = [str(self.folder / self._paths[word]) if word in self._paths else word for word in arguments]
        workers = value_of(arguments, "--workers")
        if workers is None:
            return _in_process(arguments, self.folder)
        arguments[arguments.index("--workers") + 1] = str(min(int(workers), MOST_WORKERS))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "preprocess_data.py", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def _in_process(arguments: Sequence[str], folder: Path) -> str:
    from mindspeed_llm.tasks.preprocess.command.main import main

    printed = io.StringIO()
    with _in(folder), contextlib.redirect_stdout(printed):
        assert main(arguments) == 0
    return printed.getvalue()


@contextlib.contextmanager
def _in(folder: Path) -> Iterator[None]:
    """Work in `folder`; afterwards the tests have their folder, and the signals that the command takes over, back."""
    before, handlers = os.getcwd(), {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
