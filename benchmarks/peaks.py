"""Peak memory and start-up on 2 ranks, each contestant in fresh processes, in turns.

    python -m benchmarks.peaks --model output/smollm2

Compares DDP, a bare fully_shard loop, and this package with and without `training.cpu_mmap_threshold`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.ratios import Ratio


def run(side: str, arguments: argparse.Namespace, threshold: int | None) -> list[dict[str, Any]]:
    """The figures of both ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "benchmarks.one_side", "--side", side, "--model", arguments.model]
    command += ["--sequence", str(arguments.sequence), "--steps", str(arguments.steps)]
    command += ["--mmap-threshold", str(threshold)] if threshold else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4, help="steps per process; the first one is not timed")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--mmap-threshold", type=int, default=4 * 2**20)
    arguments = parser.parse_args()
    contestants = {
        "ddp": ("ddp", None),
        "fully_shard": ("fully_shard", None),
        "ours": ("ours", None),
        "ours with threshold": ("ours", arguments.mmap_threshold),
    }
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in contestants}
    for _ in range(arguments.rounds):
        for name, (side, threshold) in contestants.items():
            ranks = run(side, arguments, threshold)
            found[name].append(ranks)
            peak, first = _peak(ranks), max(rank["first_step"] for rank in ranks)
            print(
                f"{name}: peak {peak:.2f} GiB, first step after {first:.1f} s, {_seconds(ranks):.2f} s a step",
                flush=True,
            )
    for name in ("ours", "ours with threshold"):
        pairs = list(zip(found[name], found["ddp"], found["fully_shard"], strict=True))
        print(Ratio(name=f"peak of {name} / ddp", values=tuple(_peak(a) / _peak(b) for a, b, _ in pairs)).line())
        speed = tuple(_seconds(c) / _seconds(a) for a, _, c in pairs)
        print(Ratio(name=f"speed of {name} / fully_shard", values=speed).line(0.95))
    starts = tuple(
        max(rank["first_step"] for rank in a) / max(rank["first_step"] for rank in b)
        for a, b in zip(found["ours"], found["fully_shard"], strict=True)
    )
    print(Ratio(name="start to first step of ours / fully_shard", values=starts).line())


def _peak(ranks: list[dict[str, Any]]) -> float:
    return max(rank["peak_gb"] for rank in ranks)


def _seconds(ranks: list[dict[str, Any]]) -> float:
    return statistics.median(ranks[0]["seconds"])


if __name__ == "__main__":
    main()
