"""Fine-tune a real small model on both backends, and compare their curves:
`python -m tests.tasks.posttrain.smollm2 lora|dpo --model DIR --data FILE --out DIR`.

Both begin with one adapter of PEFT whose B is zero and see the same samples in the same order, in one process each.
What is learned must show on records that are held out: with `lora` their loss falls, with `dpo` their margin rises.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_llm.observability.loss_plot import FILE_NAME as PICTURE
from mindspeed_llm.observability.metrics_file import read_metrics
from tests.support.command_line import environment
from tests.support.reference import relative
from tests.tasks.posttrain.conversations import write_records

ROOT = Path(__file__).parents[3]
RANK, ALPHA, SEED = 8, 16, 42
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MEGATRON_TARGETS = (
    *("linear_q", "linear_k", "linear_v", "linear_proj"),
    *("linear_fc1_gate", "linear_fc1_up", "linear_fc2"),
)
TOLERANCE = 1e-3
Launch = Callable[[Mapping[str, Sequence[str]]], dict[str, tuple[int, str]]]
"""Runs root scripts with arguments; gives for each its exit code, and what was printed where that is not 0."""
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One of the two trainings."""

    stage: str
    steps: int
    batch: int
    """Samples of a step; pairs count as one."""
    length: int
    characters: int | None
    """Where replies are cut; None: they are not."""
    train: int
    """Records to train on."""
    held_out: int
    """Records to evaluate on, a multiple of `batch`."""
    learning_rate: float
    eval_interval: int
    formatting: str
    handler: str
    measure: str
    """What `eval_...` of the held-out records is looked at."""
    rises: bool

    def is_better(self, later: float, earlier: float) -> bool:
        """Whether the measure has gone where it should."""
        return later > earlier if self.rises else later < earlier


JOBS = {
    "lora": Job(
        stage="sft",
        steps=40,
        batch=5,
        length=128,
        characters=None,
        train=200,
        held_out=20,
        learning_rate=5e-4,
        eval_interval=20,
        formatting="alpaca",
        handler="AlpacaStyleInstructionHandler",
        measure="loss",
        rises=False,
    ),
    "dpo": Job(
        stage="dpo",
        steps=20,
        batch=2,
        length=128,
        characters=240,
        train=32,
        held_out=10,
        learning_rate=5e-4,
        eval_interval=10,
        formatting="sharegpt",
        handler="SharegptStylePairwiseHandler",
        measure="rewards_margin",
        rises=True,
    ),
}


def save_adapter(model: Path, folder: Path) -> Path:
    """An adapter as PEFT begins: A random, B zero."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora).save_pretrained(folder)
    return folder


def fsdp2_arguments(job: Job, files: Files, output: Path) -> list[str]:
    """Arguments of `train_fsdp2.py`; writes the YAML file that they name."""
    common = {"formatting": job.formatting, "ranking": job.stage == "dpo"}
    sections = {
        "model": {"model_name_or_path": str(files.model), "adapter_name_or_path": str(files.adapter)},
        "data": {
            "dataset": {"file_name": str(files.train), **common},
            "eval_dataset": {"file_name": str(files.held_out), **common},
            "cutoff_len": job.length,
            **({"template": files.template} if files.template else {}),
        },
        "parallel": {"param_dtype": "fp32"},
        "training": {
            "stage": job.stage,
            "output_dir": str(output),
            "seed": SEED,
            "disable_shuffling": True,
            "max_steps": job.steps,
            "per_device_train_batch_size": job.batch,
            "eval_on_start": True,
            "eval_steps": job.eval_interval,
            "lr": job.learning_rate,
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


def megatron_arguments(job: Job, files: Files, output: Path) -> list[str]:
    """Arguments of `posttrain_gpt.py`, for the same training."""
    return [
        *("--stage", job.stage, "--model-from-hf", str(files.model), "--load", str(files.model)),
        *("--lora-load", str(files.adapter), "--lora-r", str(RANK), "--lora-alpha", str(ALPHA)),
        *("--lora-target-modules", *MEGATRON_TARGETS),
        *("--train-data-path", str(files.train), "--valid-data-path", str(files.held_out)),
        *("--data-cache-path", f"{output}_cache", "--handler-name", job.handler, "--no-shuffle"),
        *(("--prompt-type", files.template) if files.template else ()),
        *(("--is-pairwise-dataset",) if job.stage == "dpo" else ()),
        *("--seq-length", str(job.length), "--no-pad-to-seq-lengths", "--seed", str(SEED)),
        *("--micro-batch-size", str(job.batch), "--global-batch-size", str(job.batch)),
        *("--train-iters", str(job.steps), "--lr", str(job.learning_rate), "--lr-decay-style", "constant"),
        *("--adam-beta1", "0.9", "--adam-beta2", "0.95", "--weight-decay", "0.01", "--clip-grad", "1.0"),
        *("--hidden-dropout", "0", "--attention-dropout", "0", "--use-flash-attn", "--log-interval", "1"),
        *("--eval-interval", str(job.eval_interval), "--eval-iters", str(job.held_out // job.batch)),
        *("--metrics-dir", str(output)),
    ]


@dataclass(frozen=True, kw_only=True)
class Files:
    """What both backends start from."""

    model: Path
    adapter: Path
    train: Path
    held_out: Path
    template: str | None = None
    """Of the chat; None: the tokenizer's own."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What a run has written: by step the loss (and the margin of pairs), and what held-out records gave."""

    steps: list[Record]
    evaluations: dict[int, float]

    @classmethod
    def read(cls, job: Job, folder: Path) -> Curves:
        """Of the run in a folder."""
        records = list(read_metrics(folder / "metrics.jsonl"))
        key = f"eval_{job.measure}"
        return cls(
            steps=[record for record in records if "lm_loss" in record],
            evaluations={record["iteration"]: record[key] for record in records if key in record},
        )


def compare(job: Job, fsdp2: Curves, megatron: Curves) -> Iterator[str]:
    """Lines of a table. Raises AssertionError where a curve is too short, the two differ, or nothing was learned.

    Losses and gradient norms may differ by `TOLERANCE` of themselves. What is measured of held-out records is a
    difference of log probabilities with pairs, and 0 to begin with: it may differ by as much of the loss, too.
    """
    assert len(fsdp2.steps) == len(megatron.steps) == job.steps, (len(fsdp2.steps), len(megatron.steps))
    differences = []
    for number, (mine, theirs) in enumerate(zip(megatron.steps, fsdp2.steps, strict=True), start=1):
        difference = relative(mine["lm_loss"], theirs["lm_loss"])
        differences.append(difference)
        shown = f"FSDP2 {theirs['lm_loss']:.6f}, Megatron {mine['lm_loss']:.6f} (relative difference {difference:.1e})"
        yield f"step {number}: loss of {shown}"
    # The Megatron backend does not evaluate before the first step.
    assert [*megatron.evaluations] == [step for step in fsdp2.evaluations if step], megatron.evaluations
    for step, value in fsdp2.evaluations.items():
        shown = f"FSDP2 {value:.6f}"
        if step in megatron.evaluations:
            other = megatron.evaluations[step]
            differences.append(abs(other - value) / max(abs(value), fsdp2.steps[step - 1]["lm_loss"]))
            shown += f", Megatron {other:.6f} (relative difference {differences[-1]:.1e})"
        yield f"held out, after step {step}: {job.measure} of {shown}"
    largest = max(differences)
    assert largest < TOLERANCE, f"the backends' curves differ by {largest:.1e}; expected less than {TOLERANCE:.0e}"
    first, last = fsdp2.evaluations[0], job.steps
    for name, curves in (("FSDP2", fsdp2), ("Megatron", megatron)):
        found = curves.evaluations[last]
        assert job.is_better(found, first), (
            f"{name}: {job.measure} of held-out records went from {first} to {found}; it should have "
            f"{'risen' if job.rises else 'fallen'}"
        )


def run(job: Job, files: Files, out: Path, launch: Launch) -> Iterator[str]:
    """Train on both backends; yields lines to print. Raises AssertionError as `compare`, and where a run fails."""
    started = time.monotonic()
    done = launch(
        {
            "train_fsdp2.py": fsdp2_arguments(job, files, out / "fsdp2"),
            "posttrain_gpt.py": megatron_arguments(job, files, out / "megatron"),
        }
    )
    for script, (code, text) in done.items():
        assert code == 0, f"{script}: exit code {code}\n{text}"
    yield f"both runs: {job.steps} steps in {time.monotonic() - started:.1f} s, start-up and evaluation included"
    yield from compare(job, Curves.read(job, out / "fsdp2"), Curves.read(job, out / "megatron"))
    yield f"pictures: {out / 'fsdp2' / PICTURE}, {out / 'megatron' / PICTURE}"


def short_records(file: Path, job: Job, tokenizer: Any) -> list[Record]:
    """The first records of a file, with their replies cut, no side of which has more tokens than a row: as many as the
    job takes.
    """
    text = file.read_text(encoding="utf-8")
    records = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
    for record in records if job.characters else ():
        for side in ("chosen", "rejected"):
            record[side] = record[side] | {"value": record[side]["value"][: job.characters]}
    found = [r for r in records if all(_size(tokenizer, chat) <= job.length for chat in chats(job, r))]
    wanted = job.train + job.held_out
    if len(found) < wanted:
        sys.exit(f"{file} has {len(found)} records of at most {job.length} tokens; {wanted} are needed")
    return found[:wanted]


def chats(job: Job, record: Record) -> list[list[dict[str, str]]]:
    """The conversations of a record: one, or that of each side of a pair."""
    if job.stage == "sft":
        question = "\n".join(filter(None, (record["instruction"], record.get("input"))))
        return [[{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]]
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    turns = [record["conversations"] + [record[side]] for side in ("chosen", "rejected")]
    return [[{"role": roles[turn["from"]], "content": turn["value"]} for turn in side] for side in turns]


def _size(tokenizer: Any, chat: list[dict[str, str]]) -> int:
    return len(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"])


def _launch(scripts: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, str]]:
    """At the same time, with a thread each: steps of so few tokens gain little from a second one."""
    started = {
        script: subprocess.Popen(
            [sys.executable, script, *argv],
            cwd=ROOT,
            env=environment(ROOT),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for script, argv in scripts.items()
    }
    # What the second prints meanwhile must not fill its pipe: it would wait.
    with ThreadPoolExecutor(len(started)) as readers:
        printed = {script: readers.submit(process.communicate) for script, process in started.items()}
    return {script: (process.returncode, printed[script].result()[0]) for script, process in started.items()}


def main() -> None:
    """Run as the options say and print a line for each run, step and evaluation."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=list(JOBS))
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory of SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, required=True, help="alpaca records, or pairs in the style of sharegpt")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    options = parser.parse_args()
    job, out, model = JOBS[options.job], options.out.resolve(), options.model.resolve()
    out.mkdir(parents=True, exist_ok=True)
    records = short_records(options.data, job, AutoTokenizer.from_pretrained(model))
    files = Files(
        model=model,
        adapter=save_adapter(model, out / "adapter"),
        train=write_records(out / "train.jsonl", records[: job.train]),
        held_out=write_records(out / "held_out.jsonl", records[job.train :]),
    )
    for line in run(job, files, out, _launch):
        print(line, flush=True)


if __name__ == "__main__":
    main()
