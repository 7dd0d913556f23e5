"""Kill all ranks of a run at random moments inside a save, again and again: `python -m tests.support.kill --kills 20`.

The ranks save after every step. After each kill the run is started anew with `resume_from_checkpoint: latest`: it must
go on from the newest published checkpoint and pass the step in which it was killed. At the end the run is compared with
one that was never killed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from mindspeed_llm.fsdp2.checkpoint.manifest import checkpoints_folder, find_checkpoints
from tests.support.pool import free_port
from tests.support.runs import exported, metrics, save_model, text_data, write_config, write_texts

DEADLINE_S = 180.0
"""No start and no step may take longer, however busy the machine is."""

MOST_FILES = 6
"""A kill comes when a save has made so many files or fewer; two ranks make six: tensors, metadata, states, manifest."""

LONGEST_DELAY_S = 0.02
"""From there to the kill."""


def _rank(rank: int, ranks: int, port: int, config: str, log: str) -> None:
    """One rank, as torchrun would start it."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)

    from mindspeed_llm import cli
    from mindspeed_llm.fsdp2.main import main

    cli.run(main, [config])


class Run:
    """Training that can be started, killed and started again."""

    def __init__(self, folder: Path, *, ranks: int, asynchronous: bool) -> None:
        self.folder, self.ranks, self.asynchronous = folder, ranks, asynchronous
        self.model = save_model(folder / "model", "llama_uneven", dropout=0.1)
        self.data = text_data(write_texts(folder / "data.jsonl", 50), manager="lf")
        # Ranks are forked from a process that has done the imports already: a start then takes a second, not fifteen.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.distributed.runs", "transformers"])
        self._starts = 0

    def start(self, output: Path, max_steps: int) -> tuple[list[BaseProcess], Path]:
        """Start all ranks; returns them and the file that their output goes to."""
        self._starts += 1
        config = write_config(
            output,
            self.model,
            self.data,
            stage="pt",
            lr_scheduler_type="constant",
            warmup_ratio=0.0,
            max_steps=max_steps,
            save_steps=1,
            save_total_limit=3,
            save_async=self.asynchronous,
            resume_from_checkpoint="latest",
        )
        log, port = self.folder / f"log_{self._starts}.txt", free_port()
        processes: list[BaseProcess] = []
        for rank in range(self.ranks):
            process = self._context.Process(target=_rank, args=(rank, self.ranks, port, config, str(log)), daemon=True)
            process.start()
            processes.append(process)
        return processes, log

    def finish(self, output: Path, max_steps: int) -> None:
        """Train to the end."""
        processes, log = self.start(output, max_steps)
        try:
            wait_until(lambda: all(not process.is_alive() for process in processes), "the end of the run", log)
            codes = [process.exitcode for process in processes]
            assert codes == [0] * self.ranks, f"exit codes {codes}\n{log.read_text()}"
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


def newest(output: Path) -> int:
    """Step of the newest published checkpoint, 0 where there is none."""
    found = find_checkpoints(output)
    return found[-1][0] if found else 0


def kill_while_saving(folder: Path, *, kills: int, seed: int, ranks: int = 2, asynchronous: bool = False) -> list[str]:
    """Kill a run `kills` times inside a save; returns a line for each. Raises AssertionError where a rule is broken."""
    chance = random.Random(seed)
    run, output, lines = Run(folder, ranks=ranks, asynchronous=asynchronous), folder / "killed", []
    checkpoints = checkpoints_folder(output)
    for number in range(1, kills + 1):
        before, unfinished = newest(output), _unfinished(checkpoints)
        processes, log = run.start(output, 100_000)

        def alive(processes: list[BaseProcess] = processes) -> bool:
            return all(process.is_alive() for process in processes)

        try:
            # The step in which the run was killed is passed again: a checkpoint beyond the one that it resumed from.
            wait_until(lambda step=before + 1: newest(output) >= step, f"step {before + 1}", log, alive)
            target = newest(output) + chance.randint(0, 2)
            wait_until(lambda step=target: newest(output) >= step, f"step {target}", log, alive)
            moment = chance.randint(0, MOST_FILES)
            wait_until(lambda step=target, files=moment: _reached(output, step + 1, files), "the next save", log, alive)
            time.sleep(chance.uniform(0, LONGEST_DELAY_S))
        finally:
            kill(processes)
        text = log.read_text()
        started = f"Resumed from {checkpoints / f'global_step_{before}'} after step {before}"
        assert (started if before else "No checkpoint") in text, f"kill {number}: expected '{started}'\n{text}"
        assert "damaged" not in text, f"kill {number}\n{text}"
        for name in unfinished:
            assert f"removed the unfinished checkpoint {checkpoints / name}" in text or name.endswith("replaced.tmp")
        left = {name: _files(checkpoints / name) for name in _unfinished(checkpoints)}
        lines.append(f"kill {number}: resumed after step {before}, newest {newest(output)}, left behind {left}")
    end = newest(output) + 2
    run.finish(output, end)
    run.finish(folder / "whole", end)
    _compare(output, folder / "whole", end)
    return lines


def _reached(output: Path, step: int, files: int) -> bool:
    """Whether the save of `step` has made `files` files, or has ended before that was seen."""
    folder = checkpoints_folder(output) / f"global_step_{step}.tmp"
    return newest(output) >= step or (folder.is_dir() and _files(folder) >= files)


def _unfinished(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.glob("global_step_*.tmp"))


def _files(folder: Path) -> int:
    # os.walk passes over folders that are renamed under it, which is what publishing does.
    return sum(len(files) for _, _, files in os.walk(folder))


def _compare(found: Path, expected: Path, steps: int) -> None:
    lines = metrics(expected)
    assert [line["iteration"] for line in lines] == list(range(1, steps + 1))
    assert metrics(found) == lines
    weights, others = exported(found), exported(expected)
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
    versions = json.loads((found / "checkpoints" / f"global_step_{steps}" / "manifest.json").read_text())
    assert versions["step"] == steps


def main() -> None:
    """Run as the options say and print a line for each kill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="number of kills, shared out over plain and async saves")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for asynchronous in (False, True):
        kills = (options.kills + (not asynchronous)) // 2
        with tempfile.TemporaryDirectory(prefix="kill_while_saving_") as folder:
            print(f"{kills} kills, seed {options.seed}, save_async {asynchronous}", flush=True)
            lines = kill_while_saving(
                Path(folder), kills=kills, seed=options.seed, ranks=options.ranks, asynchronous=asynchronous
            )
            print("\n".join(lines), flush=True)
    print("every resume worked, and the runs equal those that were never killed")


if __name__ == "__main__":
    # By its own name: the ranks import it under that name too.
    from tests.support import kill as this_module

    this_module.main()
