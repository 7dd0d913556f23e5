"""One contestant alone in fresh processes: peak memory, time from process start to the first step, seconds per step.

Started by `benchmarks.peaks`; prints one JSON object per rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import psutil
import torch
import torch.distributed as dist

from benchmarks import sides
from mindspeed_llm.platform import distributed, memory


def main() -> None:
    """Run some steps and print the figures of this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=["ours", "plain", "ddp", "fully_shard"], required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--mmap-threshold", type=int)
    arguments = parser.parse_args()
    if arguments.mmap_threshold:
        assert memory.return_freed_blocks(arguments.mmap_threshold)
    torch.set_num_threads(max((os.cpu_count() or 1) // distributed.world_size(), 1))
    distributed.init_process_group()
    step = getattr(sides, arguments.side)(arguments.model)
    batches = sides.random_batches(arguments.model, sequence=arguments.sequence, seed=distributed.rank())
    seconds = []
    first_step = 0.0
    for number in range(arguments.steps):
        batch = next(batches)
        dist.barrier()
        started = time.perf_counter()
        step(batch)
        dist.barrier()
        seconds.append(time.perf_counter() - started)
        if number == 0:
            first_step = time.time() - psutil.Process().create_time()
    figures = {
        "rank": distributed.rank(),
        "peak_gb": memory.max_memory_allocated_gb(),
        "first_step": first_step,
        "seconds": seconds[1:],
    }
    sys.stdout.write(json.dumps(figures) + "\n")  # one write, so that the ranks' lines do not mix
    sys.stdout.flush()
    dist.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
