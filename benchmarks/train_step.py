"""Speed of a training step against bare loops, measured in turns.

    python scripts/demo_model.py --out output/smollm2
    python -m benchmarks.train_step --model output/smollm2                       # 1 rank: bare loop, HF Trainer
    torchrun --nproc_per_node 2 -m benchmarks.train_step --model output/smollm2  # 2 ranks: fully_shard, DDP

All sides live in the same processes and take turns (A B C A B C ...) on the same batches. The first two rounds warm
up. Losses of the sides are compared, so that no side is fast by computing something else. Torch's default number of
threads is divided by the number of ranks.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist

from benchmarks import sides
from benchmarks.ratios import speed_ratio
from mindspeed_llm.platform import distributed

WARM_UP = 2
BARS = {"plain": 0.95, "hf_trainer": 1.0, "fully_shard": 1.0, "ddp": None}


def main() -> None:
    """Measure, and print all times and ratios on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--sequence", type=int, default=512, help="tokens per sample (default 512)")
    parser.add_argument("--pairs", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--peers", nargs="+", choices=list(BARS), help="default: those for the number of ranks")
    arguments = parser.parse_args()

    ranks = distributed.world_size()
    torch.set_num_threads(max((os.cpu_count() or 1) // ranks, 1))
    distributed.init_process_group()
    peers = arguments.peers or (["plain", "hf_trainer"] if ranks == 1 else ["fully_shard", "ddp"])
    rounds = WARM_UP + arguments.pairs
    steps = {"ours": sides.ours(arguments.model, sequence=arguments.sequence)}
    for name in peers:
        steps[name] = (
            sides.hf_trainer(arguments.model, steps=rounds)
            if name == "hf_trainer"
            else getattr(sides, name)(arguments.model)
        )
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    batches = sides.random_batches(arguments.model, sequence=arguments.sequence, seed=distributed.rank())
    for number in range(rounds):
        batch = next(batches)
        losses = {}
        for name, step in steps.items():
            dist.barrier()
            started = time.perf_counter()
            losses[name] = step(batch)
            dist.barrier()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
        _say(f"round {number}: " + ", ".join(f"{name} loss {value:.5f}" for name, value in losses.items()))
    tokens = arguments.sequence * ranks
    for name, values in seconds.items():
        times = " ".join(f"{value:.2f}" for value in values)
        _say(f"{name}: {tokens / (sum(values) / len(values)):.1f} tokens/s, seconds per step {times}")
    for name in peers:
        ratio = speed_ratio(f"speed of ours / {name}, {ranks} ranks", ours=seconds["ours"], peer=seconds[name])
        _say(ratio.line(BARS[name]))
    distributed.destroy_process_group()


def _say(text: str) -> None:
    if distributed.is_rank_zero():
        print(text, flush=True)


if __name__ == "__main__":
    main()
