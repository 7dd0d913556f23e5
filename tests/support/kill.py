"""Kill all ranks of a run at random moments inside a save, again and again: `python -m tests.support.kill --kills 20`.

The ranks save after every step. After each kill the run is started anew with `resume_from_checkpoint: latest`: it must
go on from the newest published checkpoint and pass the step in which it was killed. At the end the run is compared with
one that was never killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from mindspeed_llm.fsdp2.checkpoint.manifest import checkpoints_folder, find_checkpoints
from tests.support.killing import LONGEST_DELAY_S, MOST_FILES, Ranks, files_in, kill, wait_until
from tests.support.runs import exported, metrics, save_model, text_data, write_config, write_texts


class Run:
    """Training that can be started, killed and started again."""

    def __init__(self, folder: Path, *, ranks: int, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.model = save_model(folder / "model", "llama_uneven", dropout=0.1)
        self.data = text_data(write_texts(folder / "data.jsonl", 50), manager="lf")
        preload = ["tests.distributed.runs", "transformers"]
        self._ranks = Ranks(folder, "mindspeed_llm.fsdp2.main:main", ranks=ranks, preload=preload)

    def start(self, output: Path, max_steps: int) -> tuple[list[BaseProcess], Path]:
        """Start all ranks; returns them and the file that their output goes to."""
        return self._ranks.start([self._config(output, max_steps)])

    def finish(self, output: Path, max_steps: int) -> None:
        """Train to the end."""
        self._ranks.finish([self._config(output, max_steps)])

    def _config(self, output: Path, max_steps: int) -> str:
        return write_config(
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
        left = {name: files_in(checkpoints / name) for name in _unfinished(checkpoints)}
        lines.append(f"kill {number}: resumed after step {before}, newest {newest(output)}, left behind {left}")
    end = newest(output) + 2
    run.finish(output, end)
    run.finish(folder / "whole", end)
    _compare(output, folder / "whole", end)
    return lines


def _reached(output: Path, step: int, files: int) -> bool:
    """Whether the save of `step` has made `files` files, or has ended before that was seen."""
    folder = checkpoints_folder(output) / f"global_step_{step}.tmp"
    return newest(output) >= step or (folder.is_dir() and files_in(folder) >= files)


def _unfinished(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.glob("global_step_*.tmp"))


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
