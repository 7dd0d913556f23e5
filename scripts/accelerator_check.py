"""The checks behind accelerator_check.sh: train, compare, save, resume and profile through the command line that
users type.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
STEPS = 20
# What the devices may differ by from the CPU in fp32: other kernels add up in another order.
LOSS_TOLERANCE = 1e-3
GRAD_NORM_TOLERANCE = 1e-2
MEMORY_TOLERANCE = 0.25


class Failed(Exception):
    """A check whose command ran, but whose figures are not right, or whose command failed."""


class Checks:
    """Runs training commands in one folder and keeps the rows of the table."""

    def __init__(self, folder: Path, *, device: str, ranks: int, model: Path, toy: Path, data: Path) -> None:
        self.folder, self.device, self.ranks = folder, device, ranks
        self.model, self.toy, self.data = model, toy, data
        self.rows: list[tuple[str, str, str]] = []

    def row(self, name: str, check: Callable[[], str]) -> None:
        """Run one check and note its outcome."""
        started = time.monotonic()
        try:
            outcome, figures = "ok", check()
        except Failed as failure:
            outcome, figures = "FAILED", str(failure)
        self.rows.append((name, outcome, f"{figures} [{time.monotonic() - started:.0f} s]"))
        print(f"{name}: {outcome}: {self.rows[-1][2]}", flush=True)

    def train(self, name: str, model: Path, *options: str, device: str | None = None, ranks: int | None = None) -> Path:
        """Train into a folder of its own and return it."""
        out = self.folder / name
        shutil.rmtree(out, ignore_errors=True)
        self._run(out, model, options, device or self.device, ranks or self.ranks)
        return out

    def again(self, out: Path, model: Path, *options: str) -> None:
        """Train into a folder that has a run already."""
        self._run(out, model, options, self.device, self.ranks)

    def _run(self, out: Path, model: Path, options: tuple[str, ...], device: str, ranks: int) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        self._call([*command, *self._arguments(out, model, options)], device)

    def plan(self, model: Path, *options: str) -> str:
        """What --check prints for the same options."""
        out = self.folder / "plan"
        command = [sys.executable, *self._arguments(out, model, options), "--check"]
        return self._call(command, self.device, WORLD_SIZE=str(self.ranks))

    def _arguments(self, out: Path, model: Path, options: tuple[str, ...]) -> list[str]:
        return [
            "train_fsdp2.py",
            f"--model.model_name_or_path={model}",
            f"--data.dataset={json.dumps({'file_name': str(self.data / 'train.jsonl')})}",
            "--data.data_manager_type=mg",
            "--training.stage=pt",
            f"--training.output_dir={out}",
            "--training.per_device_train_batch_size=1",
            "--training.save_steps=0",
            "--training.save_epochs=0",
            *options,
        ]

    def _call(self, command: list[str], device: str, **environment: str) -> str:
        threads = str(max((os.cpu_count() or 1) // self.ranks, 1))
        variables = {**os.environ, "MINDSPEED_DEVICE": device, "OMP_NUM_THREADS": threads, **environment}
        done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = (done.stdout + done.stderr).splitlines()
            errors = [line for line in lines if "error" in line.lower()] or lines
            raise Failed(f"exit code {done.returncode}: {errors[0] if errors else ''}")
        return done.stdout


def metrics(out: Path) -> list[dict[str, Any]]:
    """The training lines of a run."""
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "lm_loss" in line]


def make_model(folder: Path, *, layers: int, hidden: int, vocabulary: int) -> Path:
    """A Llama with random weights and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    if (folder / "config.json").is_file():
        return folder
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 192, 1),
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def bf16_training(checks: Checks, sequence: int) -> str:
    """The loss falls in bf16; speed and MFU of the later half of the steps."""
    out = checks.train("bf16", checks.model, *bf16_options(sequence))
    lines = metrics(out)
    first, last = lines[0]["lm_loss"], lines[-1]["lm_loss"]
    if not last < first:
        raise Failed(f"the loss went from {first:.4f} to {last:.4f}")
    later = lines[len(lines) // 2 :]
    speed = sum(line["tokens_per_second"] for line in later) / len(later)
    known = [line["mfu"] for line in later if line.get("mfu") is not None]
    mfu = f"{100 * sum(known) / len(known):.1f} %" if known else "not known for this device"
    return f"loss {first:.4f} -> {last:.4f} in {len(lines)} steps, {speed:,.0f} tokens/s, MFU {mfu}"


def bf16_options(sequence: int) -> list[str]:
    """The options of the bf16 training, which the plan is made for too."""
    return [
        f"--data.cutoff_len={sequence}",
        f"--training.max_steps={STEPS}",
        "--training.lr=3e-4",
        "--training.save_hf_weights=false",
        "--optimization.use_flash_attn",
        "--optimization.use_fused_rmsnorm",
        "--optimization.use_fused_rotary_pos_emb",
    ]


def toy_parity(checks: Checks) -> str:
    """One toy step in fp32 on the device equals the CPU's."""
    options = ["--data.cutoff_len=64", "--training.max_steps=1", "--parallel.param_dtype=fp32"]
    options += ["--training.save_hf_weights=false", "--training.warmup_ratio=0"]
    ours = metrics(checks.train("parity_device", checks.toy, *options, ranks=1))[0]
    reference = metrics(checks.train("parity_cpu", checks.toy, *options, ranks=1, device="cpu"))[0]
    differences = {key: abs(ours[key] - reference[key]) / abs(reference[key]) for key in ("lm_loss", "grad_norm")}
    text = f"relative difference of the loss {differences['lm_loss']:.1e}"
    text += f", of the gradient norm {differences['grad_norm']:.1e}"
    if differences["lm_loss"] > LOSS_TOLERANCE or differences["grad_norm"] > GRAD_NORM_TOLERANCE:
        raise Failed(text)
    return text


def memory_plan(checks: Checks, sequence: int) -> str:
    """The allocator's peak is near what --check announces."""
    printed = checks.plan(checks.model, *bf16_options(sequence))
    match = re.search(r"Memory per rank\s+([\d.]+) (GiB|MiB) at the peak", printed)
    if match is None:
        raise Failed("--check printed no memory estimate")
    planned = float(match[1]) / (1 if match[2] == "GiB" else 1024)
    found = metrics(checks.folder / "bf16")[-1]["max_memory_allocated_gb"]
    text = f"planned {planned:.2f} GiB, measured {found:.2f} GiB"
    if checks.device == "cpu":
        return f"{text} (on the CPU the whole process counts, so this is not compared)"
    if abs(planned - found) > MEMORY_TOLERANCE * found:
        raise Failed(text)
    return text


def save_and_resume(checks: Checks) -> str:
    """Eight steps in one go equal four and four."""
    options = ["--data.cutoff_len=64", "--training.max_steps=8", "--training.save_steps=4", "--training.save_async"]
    whole = checks.train("whole", checks.toy, *options)
    resumed = checks.train("resumed", checks.toy, *options)
    shutil.rmtree(resumed / "checkpoints" / "global_step_8")
    checks.again(resumed, checks.toy, *options, "--training.resume_from_checkpoint=latest")
    pairs = list(zip(metrics(whole), metrics(resumed), strict=True))
    for one, other in pairs:
        if (one["lm_loss"], one["grad_norm"]) != (other["lm_loss"], other["grad_norm"]):
            raise Failed(f"step {one['iteration']}: loss {other['lm_loss']} after resuming instead of {one['lm_loss']}")
    return f"{len(pairs)} steps bit-equal"


def profile(checks: Checks) -> str:
    """A profile is recorded."""
    folder = checks.folder / "profile"
    shutil.rmtree(folder, ignore_errors=True)
    options = ["--data.cutoff_len=64", "--training.max_steps=4", "--training.save_hf_weights=false"]
    options += ["--training.profile", "--training.profile_step_start=1", "--training.profile_step_end=3"]
    checks.train("profiled", checks.toy, *options, f"--training.profile_save_path={folder}")
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    if not files:
        raise Failed(f"no file in {folder}")
    return f"{len(files)} files, {sum(path.stat().st_size for path in files) / 2**20:.1f} MiB"


def main() -> int:
    """Run all checks; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "output" / "accelerator_check")
    arguments = parser.parse_args()

    sys.path.insert(0, str(REPOSITORY))
    from mindspeed_llm.platform import device

    kind, on_cpu = device.device_type(), device.device_type() == "cpu"
    devices = 2 if on_cpu else device.device_module().device_count()
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, "scripts/demo_text.py", "--out", str(out / "data")],
        cwd=REPOSITORY,
        check=True,
        stdout=sys.stderr,
    )
    toy = make_model(out / "toy", layers=2, hidden=128, vocabulary=509)
    model = arguments.model.absolute() if arguments.model else None
    if model is None:
        model = toy if on_cpu else make_model(out / "model", layers=30, hidden=576, vocabulary=49152)
    sequence = 128 if on_cpu else 2048
    checks = Checks(out, device=kind, ranks=arguments.ranks or devices, model=model, toy=toy, data=out / "data")
    print(
        f"device {kind} ({device.device_name()}), {checks.ranks} ranks" + (": a dry run" if on_cpu else ""), flush=True
    )
    checks.row("bf16 training", lambda: bf16_training(checks, sequence))
    checks.row("memory against --check", lambda: memory_plan(checks, sequence))
    checks.row("toy step against CPU fp32", lambda: toy_parity(checks))
    checks.row("save and resume", lambda: save_and_resume(checks))
    checks.row("profile", lambda: profile(checks))
    width = max(len(name) for name, _, _ in checks.rows)
    print("\n" + "\n".join(f"{name:<{width}}  {outcome:<6}  {figures}" for name, outcome, figures in checks.rows))
    return int(any(outcome != "ok" for _, outcome, _ in checks.rows))


if __name__ == "__main__":
    sys.exit(main())
