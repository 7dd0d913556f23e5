"""Speed and peak memory of LoRA training on both backends against `peft` with Hugging Face's Trainer.

    python scripts/demo_model.py --out output/smollm2
    python -m benchmarks.lora_step --model output/smollm2

Each side is a process of its own: `train_fsdp2.py` and `pretrain_gpt.py` as they are, with their logs and files, and a
script of a few lines around `peft` and the Trainer. All begin with the same adapter (rank 8 on all linear layers of the
decoder), see the same samples, one a step, and make their steps in turns (A B C B C A ...), while the others wait. A
step lasts until the next one could begin; beside its time it is counted how much the process computed in it, which
depends less on what else the machine does. The first two rounds warm up. Losses of all sides must agree in each step,
so that none is fast by computing something else. Peak memory is the largest resident memory of a process from its start
to its last step, the weights' loading included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.ratios import Ratio, speed_ratio

WARM_UP = 2
SAME_LOSS = 1e-4
PEER = "peft"
NAMES = {"peft": "peft with Trainer", "fsdp2": "FSDP2", "mcore": "Megatron"}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one side: of its steps, in order, and of each of its processes."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """Of all threads."""
    peaks_gb: list[float] = field(default_factory=list)


class Side:
    """A process that waits before each of its steps."""

    def __init__(self, name: str, words: list[str], folder: Path) -> None:
        self.name = name
        self._command = [sys.executable, "-m", "benchmarks.lora_side", "--side", name, *words]
        self._log = (folder / f"{name}.log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._said: list[str] = []
        self.peak_gb = 0.0

    def start(self) -> None:
        """Wait until the first step can begin; before, sides start at the same time."""
        self.peak_gb = self._wait()["peak_gb"]

    def step(self, figures: Figures | None) -> float:
        """One step; adds to `figures`, and gives the loss."""
        assert self._process.stdin is not None
        cpu, started = self._cpu_seconds(), time.perf_counter()
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._wait()
        if figures is not None:
            figures.seconds.append(time.perf_counter() - started)
            figures.cpu_seconds.append(self._cpu_seconds() - cpu)
        self.peak_gb = answer["peak_gb"]
        return answer["loss"]

    def end(self) -> None:
        """Let the process end. It is not looked at what it says about that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.stdout.read()  # type: ignore[union-attr]
        self._process.wait()
        self._log.close()

    def _cpu_seconds(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def _wait(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"loss"'):
                return json.loads(line)
            self._said.append(line)
        self._log.seek(0)
        sys.exit(f"{' '.join(self._command)} failed:\n{''.join(self._said)}{self._log.read()}")


def main() -> None:
    """Measure, and print all times, peaks and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--sequence", type=int, default=512, help="tokens per sample (default 512)")
    parser.add_argument("--pairs", type=int, default=5, help="measured rounds of each run (default 5)")
    parser.add_argument("--runs", type=int, default=3, help="runs in fresh processes (default 3)")
    parser.add_argument("--sides", nargs="+", choices=[n for n in NAMES if n != PEER], default=["fsdp2", "mcore"])
    arguments = parser.parse_args()
    names = [PEER, *arguments.sides]
    found = {name: Figures() for name in names}
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as folder:
            _run(arguments, Path(folder), found)
    for name, figures in found.items():
        speed = arguments.sequence * len(figures.seconds) / sum(figures.seconds)
        print(f"{NAMES[name]}: {speed:.1f} tokens/s, seconds per step {_numbers(figures.seconds)}")
        print(f"{NAMES[name]}: CPU seconds per step {_numbers(figures.cpu_seconds)}")
        print(f"{NAMES[name]}: peak memory in GiB {_numbers(figures.peaks_gb)}")
    peer = found[PEER]
    for name in arguments.sides:
        mine, what = found[name], f"{NAMES[name]} / {NAMES[PEER]}"
        print(speed_ratio(f"speed of {what}", ours=mine.seconds, peer=peer.seconds).line(1.0))
        print(_quotients(f"CPU time of {what}", mine.cpu_seconds, peer.cpu_seconds).line())
        memory = _quotients(f"peak memory of {what}", mine.peaks_gb, peer.peaks_gb)
        print(f"{memory.line()}; bar at most 1.00 {'holds' if memory.median <= 1.0 + memory.spread else 'MISSED'}")


def check(losses: Mapping[str, float]) -> None:
    """End the process where the losses of a step, by side, are not the peer's."""
    if any(abs(loss - losses[PEER]) > SAME_LOSS * losses[PEER] for loss in losses.values()):
        sys.exit("the sides do not compute the same: their times cannot be compared")


def _quotients(name: str, mine: list[float], theirs: list[float]) -> Ratio:
    return Ratio(name=name, values=tuple(a / b for a, b in zip(mine, theirs, strict=True)))


def _numbers(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def _run(arguments: argparse.Namespace, folder: Path, found: dict[str, Figures]) -> None:
    """All sides once, in fresh processes; adds to what was `found`."""
    from benchmarks.lora_sides import make_inputs

    rounds = WARM_UP + arguments.pairs
    # One more than is made, in front of which a side tells the loss of the last.
    steps = rounds + 1
    make_inputs(arguments.model, folder, sequence=arguments.sequence, steps=steps)
    words = ["--model", arguments.model, "--folder", str(folder)]
    words += ["--sequence", str(arguments.sequence), "--steps", str(steps)]
    sides = [Side(name, words, folder) for name in found]
    for side in sides:
        side.start()
    for number in range(rounds):
        # Each is first in turn: one that always followed the same other would find its caches as that one leaves them.
        order = sides[number % len(sides) :] + sides[: number % len(sides)]
        losses = {side.name: side.step(found[side.name] if number >= WARM_UP else None) for side in order}
        print(
            f"round {number}: " + ", ".join(f"loss of {NAMES[name]} {losses[name]:.6f}" for name in found), flush=True
        )
        check(losses)
    for side in sides:
        side.end()
        found[side.name].peaks_gb.append(side.peak_gb)


if __name__ == "__main__":
    main()
