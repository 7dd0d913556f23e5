"""Speed of the Megatron backend's training loop against a bare loop over megatron-core, measured in turns; its start.

    python scripts/demo_model.py --out output/smollm2
    python -m benchmarks.mcore_step --model output/smollm2
    torchrun --nproc_per_node 2 -m benchmarks.mcore_step --model output/smollm2 --flags=--use-distributed-optimizer

`pretrain_gpt.py` runs as it is, with its log and files; before each of its steps the bare loop makes one, on the same
micro batch and in the same processes. A step of ours lasts until the next one begins. The first two rounds warm up.
Losses of the two must agree, so that none is fast by computing something else. Torch's default number of threads is
divided by the number of ranks.

On one rank also the start is measured: the time from the start of the process to the first step, against a process
that imports torch and megatron-core and builds a model of the same sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks import mcore_sides
from benchmarks.ratios import Ratio, speed_ratio
from mindspeed_llm.platform import distributed
from mindspeed_llm.platform.device import current_device

WARM_UP = 2
BAR = 0.95
SAME_LOSS = 1e-4
PARTS = ("speed", "start")


class Turns:
    """The two loops in turns; `run` stands in for the training of `pretrain`."""

    def __init__(self) -> None:
        self.ours: list[float] = []
        self.bare: list[float] = []
        self.losses: list[float] = []
        self.bare_losses: list[float] = []
        self._started = 0.0

    def run(self, args: Namespace, training: mcore_sides.Training) -> int:
        """Train with `args`, a step of the bare loop before each of ours but the last, which is not timed."""
        bare, batches = mcore_sides.BareLoop(args), mcore_sides.all_batches(args)
        count = len(batches) // args.train_iters

        def turn() -> None:
            number = len(self.bare)
            _wait()
            now = time.perf_counter()
            if number:
                self.ours.append(now - self._started)
            if number < args.train_iters - 1:
                loss = bare.step(batches[number * count : (number + 1) * count])
                _wait()
                self.bare.append(time.perf_counter() - now)
                self.bare_losses.append(_mean(loss))
            self._started = time.perf_counter()

        with mcore_sides.before_each_step(turn, self.losses):
            return training(args)


def main() -> None:
    """Measure, and print all times and ratios on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--sequence", type=int, default=512, help="tokens per sample (default 512)")
    parser.add_argument("--micro-batches", type=int, default=1, help="samples of each rank in a step (default 1)")
    parser.add_argument("--pairs", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--flags", default="", help="more flags of pretrain_gpt.py, as one word")
    arguments = parser.parse_args()
    if "speed" in arguments.parts:
        measure_speed(arguments)
    if "start" in arguments.parts and distributed.world_size() == 1:
        measure_start(arguments)


def measure_speed(arguments: Namespace) -> None:
    """Both loops in turns, in this process."""
    from mindspeed_llm.training.main import main as pretrain

    ranks = distributed.world_size()
    torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))
    turns = Turns()
    steps = WARM_UP + arguments.pairs + 1
    with tempfile.TemporaryDirectory() as folder, mcore_sides.around_training(turns.run):
        pretrain(_flags(arguments, batch=ranks * arguments.micro_batches, steps=steps, metrics=folder))
    if distributed.rank():
        return
    compare(turns.losses, turns.bare_losses, rounds=steps - 1)
    ours, bare = turns.ours[WARM_UP:], turns.bare[WARM_UP:]
    tokens = arguments.sequence * arguments.micro_batches * ranks
    for name, values in (("ours", ours), ("bare", bare)):
        times = " ".join(f"{value:.3f}" for value in values)
        print(f"{name}: {tokens * len(values) / sum(values):.1f} tokens/s, seconds per step {times}")
    print(speed_ratio(f"speed of ours / bare loop, {ranks} ranks", ours=ours, peer=bare).line(BAR), flush=True)


def compare(ours: Sequence[float], bare: Sequence[float], *, rounds: int) -> None:
    """Print the losses of both loops; our last step has no round.

    Raises:
        SystemExit: a loss is missing, is no number, or is not that of the other loop.
    """
    if (len(ours), len(bare)) != (rounds + 1, rounds):
        sys.exit(f"{len(ours)} losses of ours and {len(bare)} of the bare loop, expected {rounds + 1} and {rounds}")
    for number, (mine, theirs) in enumerate(zip(ours[:-1], bare, strict=True)):
        print(f"round {number}: loss of ours {mine:.6f}, of the bare loop {theirs:.6f}")
        if not (math.isfinite(theirs) and math.isclose(mine, theirs, rel_tol=SAME_LOSS)):
            sys.exit("the two do not compute the same: their times cannot be compared")


def measure_start(arguments: Namespace) -> None:
    """Fresh processes in turns."""
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "ours": _flags(arguments, batch=1, steps=1, metrics=folder),
            "floor": [arguments.model, str(arguments.sequence)],
        }
        seconds: dict[str, list[float]] = {side: [] for side in commands}
        for _ in range(arguments.pairs):
            for side, words in commands.items():
                seconds[side].append(_start([side, *words]))
    for side, values in seconds.items():
        print(f"start to first step, {side}: seconds {' '.join(f'{value:.2f}' for value in values)}")
    ratios = tuple(mine / theirs for mine, theirs in zip(seconds["ours"], seconds["floor"], strict=True))
    print(Ratio(name="start to first step of ours / floor", values=ratios).line())


def _flags(arguments: Namespace, *, batch: int, steps: int, metrics: str) -> list[str]:
    words = mcore_sides.flags(arguments.model, sequence=arguments.sequence, batch=batch, steps=steps, metrics=metrics)
    return [*words, *shlex.split(arguments.flags)]


def _start(words: list[str]) -> float:
    command = [sys.executable, "-m", "benchmarks.mcore_start", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(lines[0])["seconds"]


def _mean(loss: float) -> float:
    """Over the ranks that have one."""
    values = torch.tensor([0.0, 0.0] if math.isnan(loss) else [loss, 1.0], device=current_device())
    dist.all_reduce(values)
    return (values[0] / values[1]).item()


def _wait() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


if __name__ == "__main__":
    main()
