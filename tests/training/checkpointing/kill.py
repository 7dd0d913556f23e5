"""Kill all ranks of a run at random moments inside a save, again and again:
`python -m tests.training.checkpointing.kill --kills 20`.

The ranks run `pretrain_gpt.py` and save after every step. After each kill the run is started anew with the same flags:
it must go on from the newest published checkpoint and pass the step in which it was killed. At the end the run is
compared with one that was never killed.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from mindspeed_llm.checkpoints.dcp_reader import SafeFileSystemReader, TensorsOnlyPlanner, read_metadata
from mindspeed_llm.tasks.checkpoint.torch_file import StoredTensor, read_torch_file
from mindspeed_llm.training.checkpointing.layout import iteration_name, iterations_in, unfinished_in
from tests.support.killing import LONGEST_DELAY_S, MOST_FILES, Ranks, files_in, kill, wait_until
from tests.support.runs import metrics
from tests.training.arguments.lines import DENSE

FORMATS = {
    "torch": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "torch_dist": "--tensor-model-parallel-size 2",
}


class Run:
    """Training that can be started, killed and started again."""

    def __init__(self, folder: Path, *, kind: str, ranks: int) -> None:
        self.kind = kind
        preload = ["tests.training.checkpointing.preloaded"]
        self._ranks = Ranks(folder, "mindspeed_llm.training.main:main", ranks=ranks, preload=preload)

    def start(self, save: Path, steps: int) -> tuple[list[BaseProcess], Path]:
        """Start all ranks; returns them and the file that their output goes to."""
        return self._ranks.start(self._flags(save, steps))

    def finish(self, save: Path, steps: int) -> None:
        """Train to the end."""
        self._ranks.finish(self._flags(save, steps))

    def _flags(self, save: Path, steps: int) -> list[str]:
        return shlex.split(
            f"{DENSE} --global-batch-size 4 --train-iters {steps} --lr-decay-style constant --eval-iters 0 "
            f"--log-interval 1 --save-interval 1 --save {save} --load {save} --ckpt-format {self.kind} "
            f"{FORMATS[self.kind]}"
        )


def newest(save: Path) -> int:
    """Step of the newest published checkpoint, 0 where there is none."""
    return max(iterations_in(save), default=0)


def kill_while_saving(folder: Path, *, kind: str, kills: int, seed: int, ranks: int = 2) -> list[str]:
    """Kill a run `kills` times inside a save; returns a line for each. Raises AssertionError where a rule is broken."""
    chance = random.Random(seed)
    run, save, lines = Run(folder, kind=kind, ranks=ranks), folder / "killed", []
    for number in range(1, kills + 1):
        before, unfinished = newest(save), _unfinished(save)
        processes, log = run.start(save, 100_000)

        def alive(processes: list[BaseProcess] = processes) -> bool:
            return all(process.is_alive() for process in processes)

        try:
            # The step in which the run was killed is passed again.
            target = before + 1 + chance.randint(0, 1)
            wait_until(lambda step=target: newest(save) >= step, f"step {target}", log, alive)
            moment = chance.randint(0, MOST_FILES)
            wait_until(lambda step=target, files=moment: _reached(save, step + 1, files), "the next save", log, alive)
            time.sleep(chance.uniform(0, LONGEST_DELAY_S))
        finally:
            kill(processes)
        text = log.read_text()
        started = f"Resumed from {save / iteration_name(before)} after step {before}"
        assert (started if before else "holds no checkpoint") in text, f"kill {number}: expected '{started}'\n{text}"
        assert "damaged" not in text and "another line" not in text, f"kill {number}\n{text}"
        for name in unfinished:
            assert f"removed the unfinished checkpoint {save / name}" in text, f"kill {number}\n{text}"
        left = {name: files_in(save / name) for name in _unfinished(save)}
        lines.append(f"kill {number}: resumed after step {before}, newest {newest(save)}, left behind {left}")
    assert not list(save.glob("set_aside*"))
    end = newest(save) + 2
    run.finish(save, end)
    run.finish(folder / "whole", end)
    _compare(save, folder / "whole", end, kind)
    return lines


def _reached(save: Path, step: int, files: int) -> bool:
    """Whether the save of `step` has made `files` files, or has ended before that was seen."""
    folder = save / f"{iteration_name(step)}.tmp"
    return newest(save) >= step or (folder.is_dir() and files_in(folder) >= files)


def _unfinished(save: Path) -> list[str]:
    return [path.name for path in unfinished_in(save)] if save.is_dir() else []


def _compare(found: Path, expected: Path, steps: int, kind: str) -> None:
    lines = metrics(expected)
    assert [line["iteration"] for line in lines] == list(range(1, steps + 1))
    assert metrics(found) == lines
    ours, others = (_tensors(folder / iteration_name(steps), kind) for folder in (found, expected))
    assert ours.keys() == others.keys() and len(ours) > 20
    assert all(torch.equal(ours[name], others[name]) for name in ours)


def _tensors(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, random states included."""
    if kind == "torch":
        paths = sorted(folder.glob("mp_rank_*/*.pt"))
        return {name: value for path in paths for name, value in _leaves(read_torch_file(path), str(path.name))}
    entries = read_metadata(folder).state_dict_metadata
    tensors = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if hasattr(entry, "size")
    }
    dcp.load(tensors, storage_reader=SafeFileSystemReader(folder), planner=TensorsOnlyPlanner(), no_dist=True)
    return tensors


def _leaves(value: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, StoredTensor):
        return [(name, value.view())]
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [leaf for key, entry in entries for leaf in _leaves(entry, f"{name}/{key}")]


def main() -> None:
    """Run as the options say and print a line for each kill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="number of kills, shared out over the formats")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for number, kind in enumerate(FORMATS):
        kills = (options.kills + 1 - number) // 2
        with tempfile.TemporaryDirectory(prefix="mcore_kill_") as folder:
            print(f"{kills} kills, seed {options.seed}, --ckpt-format {kind}", flush=True)
            for line in kill_while_saving(Path(folder), kind=kind, kills=kills, seed=options.seed, ranks=options.ranks):
                print(line, flush=True)
    print("every resume worked, and the runs equal those that were never killed")


if __name__ == "__main__":
    # By its own name: the ranks import it under that name too.
    from tests.training.checkpointing import kill as this_module

    this_module.main()
