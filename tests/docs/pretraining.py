"""Runs the documentation's commands of the Megatron backend, each once, shortened, and what they read before them."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path

from tests.docs.pages import ROOT, Command
from tests.docs.preprocessing import value_of
from tests.docs.workplace import make_workplace, save_model
from tests.support.pool import MAX_RANKS, RankPool

PROGRAM = "pretrain_gpt.py"
# Program -> the row of tests.examples.rows that runs it.
PROGRAMS = {PROGRAM: "pretrain_in", "posttrain_gpt.py": "posttrain_in"}
SCRIPT = re.compile(r"examples/mcore/\w+/pretrain_\w+\.sh")
OUTPUT = "output/mcore/"
# Instead of training: they print.
PRINTING = {"--check", "--list-features"}
# Warm-ups of the pages take two steps of sixteen.
SHORTER = 4
# What a conversion reads.
_READ = ("--load-dir", "--lora-load")


def pretrain_arguments(command: Command) -> list[str] | None:
    """The arguments of a program that trains, or None when the command is another one."""
    program = program_of(command)
    return None if program is None else list(command.words[command.words.index(program) + 1 :])


def program_of(command: Command) -> str | None:
    """The program of the Megatron backend that a command runs."""
    return next((word for word in command.words if word in PROGRAMS), None)


def is_ours(command: Command) -> bool:
    """Whether a command belongs to the Megatron backend: training, a script of it, or what reads its output."""
    if pretrain_arguments(command) is not None:
        return True
    match command.words:
        case ["bash", script, *_]:
            return SCRIPT.fullmatch(script) is not None
        case ["python", "convert_ckpt_v2.py", *arguments]:
            return any((value_of(arguments, flag) or "").startswith(OUTPUT) for flag in (*_READ, "--save-dir"))
    return False


def num_ranks(command: Command) -> int:
    """The number of ranks that torchrun starts; 1 without it."""
    return int(value_of(list(command.words), "--nproc_per_node") or 1)


def make_mcore_workplace(folder: Path) -> Path:
    """The folder of the other pages, with what those of the Megatron backend name besides."""
    make_workplace(folder)
    for name in (*PROGRAMS, "convert_ckpt_v2.py"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    if not (folder / "model_from_hf/qwen3_moe_hf").exists():
        save_model("qwen3_moe", folder / "model_from_hf/qwen3_moe_hf")
    return folder


def shortened(arguments: Sequence[str]) -> list[str]:
    """Arguments that train for a quarter of the steps, and evaluate, if at all, on little."""
    steps = max(1, int(value_of(arguments, "--train-iters") or SHORTER) // SHORTER)
    evaluation = [] if value_of(arguments, "--eval-iters") == "0" else ["--eval-interval", "1", "--eval-iters", "1"]
    return [*arguments, "--train-iters", str(steps), *evaluation]


class Pretrained:
    """Runs commands in `folder`: training on the rank pool, what prints or converts in this process."""

    def __init__(self, folder: Path, commands: Sequence[Command], pool: RankPool) -> None:
        self.folder, self._pool = folder, pool
        self._trained: set[str] = set()
        self._printed: dict[str, str] = {}
        self._writing = [
            command
            for command in commands
            if "convert_ckpt_v2.py" in command.words
            or ((arguments := pretrain_arguments(command)) is not None and not PRINTING & set(arguments))
        ]

    def train(self, command: Command) -> Path:
        """Train as `command` says, unless it has been done, after the runs that it goes on from; the folder of
        `--save`.
        """
        arguments = pretrain_arguments(command)
        assert arguments is not None
        if command.text not in self._trained:
            self._trained.add(command.text)
            for flag in ("--load", "--lora-load"):
                self._provide(value_of(arguments, flag), before=command)
            ranks = num_ranks(command)
            assert ranks <= MAX_RANKS, "more ranks than the pool has: the page should only check it"
            codes = self._pool.run(
                f"tests.examples.rows:{PROGRAMS[program_of(command) or PROGRAM]}",
                draw=True,
                ranks=ranks,
                folder=str(self.folder),
                argv=shortened(arguments),
            )
            assert codes == [0] * ranks
        return self.folder / (value_of(arguments, "--save") or "")

    def print(self, command: Command) -> str:
        """What a command prints that trains nothing."""
        if command.text not in self._printed:
            arguments = list(command.words)
            if (found := pretrain_arguments(command)) is not None:
                from mindspeed_llm.training.main import main

                arguments = found
            else:
                from mindspeed_llm.tasks.checkpoint.main import main

                for flag in _READ:
                    self._provide(value_of(arguments, flag), before=command)
                arguments = arguments[arguments.index("convert_ckpt_v2.py") + 1 :]
            printed, before = io.StringIO(), os.getcwd()
            os.chdir(self.folder)
            try:
                with contextlib.redirect_stdout(printed):
                    assert not main(arguments)
            finally:
                os.chdir(before)
            self._printed[command.text] = printed.getvalue()
        return self._printed[command.text]

    def _provide(self, path: str | None, *, before: Command) -> None:
        """Run the first command that saves in `path`."""
        for command in self._writing:
            if command is before:
                return
            is_run = pretrain_arguments(command) is not None
            if path is not None and value_of(list(command.words), "--save" if is_run else "--save-dir") == path:
                (self.train if is_run else self.print)(command)
                return
