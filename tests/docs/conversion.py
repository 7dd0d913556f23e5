"""Runs the documentation's convert_ckpt_v2.py commands, each once, in this process, and what they read before them."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path

from tests.docs.pages import Command
from tests.docs.preprocessing import value_of


def conversion_arguments(command: Command) -> list[str] | None:
    """The arguments of convert_ckpt_v2.py, or None when the command is another one."""
    match command.words:
        case ["python", "convert_ckpt_v2.py", *arguments]:
            return arguments
    return None


class Converted:
    """Runs commands in `folder`."""

    def __init__(self, folder: Path, commands: Sequence[Command]) -> None:
        self.folder = folder
        self._printed: dict[str, str] = {}
        self._writes: dict[str, Command] = {}
        for command in commands:
            arguments = conversion_arguments(command) or []
            # The first one counts: what another writes to the same folder, --overwrite replaces.
            if "--dry-run" not in arguments:
                self._writes.setdefault(_path(value_of(arguments, "--save-dir")), command)

    def run(self, command: Command) -> str:
        """Run a command, unless it has been run, after those whose output it reads; returns what it printed."""
        if command.text not in self._printed:
            arguments = conversion_arguments(command) or []
            for flag in ("--load-dir", "--lora-load", "--hf-cfg-dir"):
                maker = self._writes.get(_path(value_of(arguments, flag)))
                if maker is not None and maker is not command:
                    self.run(maker)
            self._printed[command.text] = self._run(arguments)
        return self._printed[command.text]

    def _run(self, arguments: Sequence[str]) -> str:
        from mindspeed_llm.tasks.checkpoint.main import main

        printed, before = io.StringIO(), os.getcwd()
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(printed):
                main(list(arguments))
        finally:
            os.chdir(before)
        return printed.getvalue()


def _path(text: str | None) -> str:
    return os.path.normpath(text) if text else ""
