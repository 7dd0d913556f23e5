"""Continue pre-training a real small model on both backends, and compare the loss of each step:
`python -m tests.training.smollm2 --model DIR --data FILE --out DIR`.

SmolLM2-135M has 9 query heads and 3 key-value heads: two tensor-parallel ranks are refused, with the reason. Two
pipeline stages and two data-parallel ranks of `pretrain_gpt.py` train on the samples that `train_fsdp2.py` trains on.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mindspeed_llm.observability.metrics_file import read_metrics
from tests.support.command_line import environment
from tests.support.reference import relative

ROOT = Path(__file__).parents[2]
RANKS, MICRO_BATCH, GLOBAL_BATCH, LEARNING_RATE = 2, 1, 4, 5e-5
TOLERANCE = 1e-4
REASON = (
    "--tensor-model-parallel-size 2 does not divide the 9 query heads and 3 key-value heads of the model: a rank would "
    "cut through a head; expected one of 1, 3"
)
TOPOLOGIES = {"PP2": "--pipeline-model-parallel-size 2", "DP2": ""}
Launch = Callable[[str, Sequence[str]], tuple[int, str]]
"""Runs a root script with arguments on two ranks; gives the exit code, and what was printed where that is not 0."""


def megatron_arguments(model: Path, data: Path, output: Path, *, steps: int, length: int, flags: str) -> list[str]:
    """Arguments of `pretrain_gpt.py`."""
    return shlex.split(
        f"--model-from-hf {model} --load {model} --data-path {data} --split 100,0,0 --append-eod --seed 42 "
        f"--data-cache-path {output}_cache --seq-length {length} --micro-batch-size {MICRO_BATCH} "
        f"--global-batch-size {GLOBAL_BATCH} --train-iters {steps} --lr {LEARNING_RATE} --lr-decay-style constant "
        "--adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.01 --clip-grad 1.0 --hidden-dropout 0 "
        f"--attention-dropout 0 --use-flash-attn --eval-iters 0 --log-interval 1 --metrics-dir {output} {flags}"
    )


def fsdp2_arguments(model: Path, data: Path, output: Path, *, steps: int, length: int) -> list[str]:
    """Arguments of `train_fsdp2.py`, for the same training; writes the YAML file that they name."""
    sections = {
        "model": {"model_name_or_path": str(model)},
        "data": {
            "data_manager_type": "mg",
            "dataset": {"file_name": str(data)},
            "cutoff_len": length,
            "append_eod": True,
        },
        "parallel": {"param_dtype": "fp32"},
        "training": {
            "stage": "pt",
            "output_dir": str(output),
            "seed": 42,
            "max_steps": steps,
            "per_device_train_batch_size": MICRO_BATCH,
            "gradient_accumulation_steps": GLOBAL_BATCH // MICRO_BATCH // RANKS,
            "lr": LEARNING_RATE,
            "min_lr": 0.0,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0.0,
            "adam_beta1": 0.9,
            "adam_beta2": 0.95,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
            "save_steps": 0,
            "save_epochs": 0,
            "save_hf_weights": False,
        },
    }
    config = output.with_name(f"{output.name}.yaml")
    config.write_text(json.dumps(sections, indent=2), encoding="utf-8")  # which is YAML, too
    return [str(config)]


def losses(output: Path) -> list[float]:
    """The loss of every step of a run."""
    return [record["lm_loss"] for record in read_metrics(output / "metrics.jsonl") if "lm_loss" in record]


def compare(launch: Launch, *, model: Path, data: Path, out: Path, steps: int = 10, length: int = 128) -> Iterator[str]:
    """Run all; yields lines to print. Raises AssertionError where a run fails or a loss differs."""
    shape = {"steps": steps, "length": length}
    started = time.monotonic()
    flags = "--tensor-model-parallel-size 2"
    code, text = launch("pretrain_gpt.py", megatron_arguments(model, data, out / "TP2", flags=flags, **shape))
    assert code == 2 and REASON in " ".join(text.split()), f"TP2: exit code {code}\n{text}"
    yield f"TP2: refused after {time.monotonic() - started:.1f} s: {REASON}"
    runs = {"FSDP2": ("train_fsdp2.py", fsdp2_arguments(model, data, out / "FSDP2", **shape))}
    for name, flags in TOPOLOGIES.items():
        runs[name] = ("pretrain_gpt.py", megatron_arguments(model, data, out / name, flags=flags, **shape))
    found: dict[str, list[float]] = {}
    for name, (script, argv) in runs.items():
        started = time.monotonic()
        code, text = launch(script, argv)
        assert code == 0, f"{name}: exit code {code}\n{text}"
        found[name] = losses(out / name)
        assert len(found[name]) == steps, f"{name}: {len(found[name])} steps"
        yield f"{name}: {steps} steps in {time.monotonic() - started:.1f} s, start-up included"
    expected, largest = found.pop("FSDP2"), 0.0
    for step, loss in enumerate(expected):
        shown = []
        for name, values in found.items():
            difference = relative(values[step], loss)
            shown.append(f"{name} {values[step]:.7f} (relative difference {difference:.1e})")
            largest = max(largest, difference)
        yield f"step {step + 1}: FSDP2 {loss:.7f}, {', '.join(shown)}"
    assert largest < TOLERANCE, f"the backends' losses differ by {largest:.1e}; expected less than {TOLERANCE:.0e}"


def _torchrun(script: str, argv: Sequence[str]) -> tuple[int, str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    done = subprocess.run(
        [*launcher, script, *argv],
        cwd=ROOT,
        env=environment(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # torchrun ends with 1 whatever its ranks end with; its report names their codes, the first failure last.
    codes = re.findall(r"exitcode +: +(-?\d+)", done.stdout)
    return int(codes[-1]) if done.returncode and codes else done.returncode, done.stdout


def main() -> None:
    """Run as the options say and print a line for each run and step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory of SmolLM2-135M")
    parser.add_argument("--data", type=Path, required=True, help='text: {"text": ...} on each line')
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    paths = {"model": options.model.resolve(), "data": options.data.resolve(), "out": options.out.resolve()}
    for line in compare(_torchrun, **paths, steps=options.steps):
        print(line, flush=True)


if __name__ == "__main__":
    main()
