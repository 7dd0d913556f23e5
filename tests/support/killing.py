"""Ranks of a training command that are killed and started again: for `tests.support.kill` and its like."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from tests.support.pool import free_port

DEADLINE_S = 180.0
"""No start and no step may take longer, however busy the machine is."""

MOST_FILES = 6
"""A kill comes when a save has made so many files or fewer; two ranks make six: tensors, metadata, states, manifest."""

LONGEST_DELAY_S = 0.02
"""From there to the kill."""


def _rank(main: str, rank: int, ranks: int, port: int, argv: list[str], log: str) -> None:
    """One rank, as torchrun would start it."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)

    from mindspeed_llm import cli

    module, name = main.split(":")
    cli.run(getattr(importlib.import_module(module), name), argv)


class Ranks:
    """The ranks of a training command, which can be killed and started again."""

    def __init__(self, folder: Path, main: str, *, ranks: int, preload: list[str]) -> None:
        """
        Args:
            folder: for the output of each start.
            main: the command's function, as "module:function".
            ranks: how many there are.
            preload: modules that are imported once. Ranks are forked from a process that has done so: a start then
                takes a second, not fifteen.
        """
        self._folder, self._main, self._ranks = folder, main, ranks
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(preload)
        self._starts = 0

    def start(self, argv: list[str]) -> tuple[list[BaseProcess], Path]:
        """Start all ranks with a command line; returns them and the file that their output goes to."""
        self._starts += 1
        log, port = self._folder / f"log_{self._starts}.txt", free_port()
        processes: list[BaseProcess] = []
        for rank in range(self._ranks):
            arguments = (self._main, rank, self._ranks, port, argv, str(log))
            process = self._context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            processes.append(process)
        return processes, log

    def finish(self, argv: list[str]) -> None:
        """Run to the end, which must be a good one."""
        processes, log = self.start(argv)
        try:
            wait_until(lambda: all(not process.is_alive() for process in processes), "the end of the run", log)
            codes = [process.exitcode for process in processes]
            assert codes == [0] * self._ranks, f"exit codes {codes}\n{log.read_text()}"
        finally:
            kill(processes)


def kill(processes: list[BaseProcess]) -> None:
    """SIGKILL to all, at once."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()


def wait_until(condition: Callable[[], bool], what: str, log: Path, alive: Callable[[], bool] | None = None) -> None:
    """Poll; fails when it takes too long, or when `alive` is given and has become false."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        text = log.read_text() if log.exists() else ""
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:.0f} s for {what}\n{text}"
        assert alive is None or alive() or condition(), f"the run ended before {what}\n{text}"
        time.sleep(0.001)


def files_in(folder: Path) -> int:
    """Number of files below a folder."""
    # os.walk passes over folders that are renamed under it, which is what publishing does.
    return sum(len(files) for _, _, files in os.walk(folder))
