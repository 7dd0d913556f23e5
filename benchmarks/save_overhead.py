"""What saving in the background costs: the real command, with and without a checkpoint every 10 steps, in turns.

    python -m benchmarks.save_overhead --model output/smollm2 --data output/quickstart/data/train.jsonl

Each run trains 21 steps on 2 ranks, so that a checkpoint is written beside steps 11 to 20; the mean time of these is
compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.ratios import Ratio

STEPS = 21


class Cost(NamedTuple):
    """Seconds per step over steps 10 to 20, the saves between them included: by the clock, and of all processors.

    The second says what saving costs also where other programs take turns with the run.
    """

    clock: float
    processors: float


def run(arguments: argparse.Namespace, folder: Path, *options: str) -> Cost:
    """Train once and take the times."""
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_fsdp2.py"]
    command += [
        f"--model.model_name_or_path={arguments.model}",
        f"--data.dataset={json.dumps({'file_name': arguments.data})}",
        "--data.data_manager_type=mg",
        f"--data.cutoff_len={arguments.sequence}",
        "--parallel.param_dtype=fp32",
        "--training.stage=pt",
        f"--training.output_dir={out}",
        f"--training.max_steps={STEPS}",
        "--training.per_device_train_batch_size=1",
        "--training.save_epochs=0",
        "--training.save_hf_weights=false",
        *options,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // 2, 1)), "PYTHONUNBUFFERED": "1"}
    # The step times of the log leave saves out; here the clock of this process counts, line by line.
    moments: dict[int, Cost] = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if " iteration " in line:
                step = int(line.split(" iteration ")[1].split("/")[0])
                moments[step] = Cost(time.monotonic(), _processor_seconds(process.pid))
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return Cost(*((after - before) / 10 for before, after in zip(moments[10], moments[20], strict=True)))


def _processor_seconds(pid: int) -> float:
    """Of the process and all that it has started and that are alive."""
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def main() -> None:
    """Measure in turns and print the share that saving adds to a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory(prefix="save_overhead_") as folder:
        for number in range(arguments.rounds):
            without = run(arguments, Path(folder), "--training.save_steps=0")
            with_saves = run(arguments, Path(folder), "--training.save_steps=10", "--training.save_async=true")
            pairs.append((with_saves, without))
            print(
                f"{datetime.now():%H:%M} round {number}: {without.clock:.2f} s a step, {with_saves.clock:.2f} s with "
                f"saves; processors {without.processors:.2f} s, {with_saves.processors:.2f} s with saves",
                flush=True,
            )
    for name in Cost._fields:
        values = tuple(getattr(one, name) / getattr(other, name) for one, other in pairs)
        print(
            Ratio(name=f"{name}: a step with a save in the background every 10 steps / without", values=values).line()
        )


if __name__ == "__main__":
    main()
