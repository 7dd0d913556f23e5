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

from benchmarks.ratios import Ratio

STEPS = 21


def run(arguments: argparse.Namespace, folder: Path, *options: str) -> float:
    """Wall-clock seconds per step over steps 10 to 20, the saves between them included."""
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
    moments: dict[int, float] = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if " iteration " in line:
                moments[int(line.split(" iteration ")[1].split("/")[0])] = time.monotonic()
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return (moments[20] - moments[10]) / 10


def main() -> None:
    """Measure in turns and print the share that saving adds to a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    values = []
    with tempfile.TemporaryDirectory(prefix="save_overhead_") as folder:
        for number in range(arguments.rounds):
            without = run(arguments, Path(folder), "--training.save_steps=0")
            with_saves = run(arguments, Path(folder), "--training.save_steps=10", "--training.save_async=true")
            values.append(with_saves / without)
            print(
                f"{datetime.now():%H:%M} round {number}: {without:.2f} s a step, {with_saves:.2f} s with saves",
                flush=True,
            )
    print(
        Ratio(name="time of a step with a save in the background every 10 steps / without", values=tuple(values)).line()
    )


if __name__ == "__main__":
    main()
