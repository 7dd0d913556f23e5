"""The benchmarks and the accelerator check run as their help says, at toy size. What they measure is not looked at."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import lora_step
from scripts import accelerator_check
from tests.support.pool import RankPool
from tests.support.runs import save_model, write_texts

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.torchrun


def run(*words: str, timeout: float = 300) -> str:
    """Standard output of a command in the repository's folder."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy with a tokenizer."""
    return save_model(tmp_path_factory.mktemp("benchmarks") / "model", "llama")


def test_train_step(model: Path) -> None:
    printed = run("-m", "benchmarks.train_step", "--model", str(model), "--sequence", "32", "--pairs", "1")
    assert len(re.findall(r"median \d", printed)) == 2, printed


@pytest.mark.long
def test_peaks(model: Path) -> None:
    printed = run("-m", "benchmarks.peaks", "--model", str(model), "--sequence", "32", "--steps", "2", "--rounds", "1")
    assert len(re.findall(r"median \d", printed)) == 5, printed


def test_mcore_step(model: Path) -> None:
    printed = run("-m", "benchmarks.mcore_step", "--model", str(model), "--sequence", "32", "--pairs", "1")
    assert len(re.findall(r"^round \d: loss of ours \d\.\d+, of the bare loop \d\.\d+$", printed, re.MULTILINE)) == 3
    assert re.search(r"^speed of ours / bare loop, 1 ranks: median \d.*; bar 0\.95 ", printed, re.MULTILINE), printed
    assert re.search(r"^start to first step of ours / floor: median \d", printed, re.MULTILINE), printed


@pytest.mark.long
def test_mcore_step_on_two_ranks(model: Path) -> None:
    """One step of two micro batches, with pipeline stages: a rank has a loss, the other has none."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words = ["--model", str(model), "--sequence", "32", "--pairs", "1", "--micro-batches", "2"]
    flags = "--flags=--pipeline-model-parallel-size 2"
    assert "speed of ours / bare loop, 2 ranks: median" in run(*launcher, "-m", "benchmarks.mcore_step", *words, flags)


@pytest.mark.long
def test_mcore_step_with_sides_that_differ(model: Path) -> None:
    """What tests/benchmarks/test_mcore_step.py says of the guard, with sides that do differ."""
    words = ["--model", str(model), "--sequence", "32", "--pairs", "1", "--parts", "speed", "--flags=--lr 1e-2"]
    with pytest.raises(AssertionError, match="the two do not compute the same"):
        run("-m", "benchmarks.mcore_step", *words)


@pytest.mark.long
def test_lora_step(model: Path) -> None:
    words = ["--model", str(model), "--sequence", "32", "--pairs", "1", "--runs", "1"]
    printed = run("-m", "benchmarks.lora_step", *words)
    of_all = r"^round \d: loss of peft with Trainer \d\.\d+, loss of FSDP2 \d\.\d+, loss of Megatron \d\.\d+$"
    assert len(re.findall(of_all, printed, re.MULTILINE)) == 3, printed
    for side in ("FSDP2", "Megatron"):
        of_side = f"of {side} / peft with Trainer: median"
        assert re.search(rf"^speed {of_side} .*; bar 1\.00 (holds|MISSED)$", printed, re.MULTILINE), printed
        assert re.search(rf"^peak memory {of_side} .*; bar at most 1\.00 (holds|MISSED)$", printed, re.MULTILINE)


def test_lora_step_with_sides_that_differ() -> None:
    lora_step.check({"peft": 2.0, "fsdp2": 2.0001, "mcore": 1.9999})
    for side in ("fsdp2", "mcore"):
        with pytest.raises(SystemExit, match="the sides do not compute the same"):
            lora_step.check({"peft": 2.0, "fsdp2": 2.0, "mcore": 2.0} | {side: 2.001})


def test_generate(model: Path) -> None:
    words = ["--pairs", "1", "--new-tokens", "8", "--num-prompts", "6", "--batch-size", "2", "--characters", "99"]
    printed = run("-m", "benchmarks.generate", "--model", str(model), *words)
    for part, peer, bar in [("single", "transformers.generate", "1.00"), ("single", "bare loop", "0.95")]:
        assert re.search(
            rf"^{part}: speed of ours / {peer}: median \d.*; bar {bar} (holds|MISSED)$", printed, re.MULTILINE
        )
    assert re.search(r"^file, round 0: 6 prompts, \d+ tokens, ours \d.* s, transformers", printed, re.MULTILINE), (
        printed
    )
    assert re.search(r"^file: speed of ours / transformers.generate: median \d.*; bar 1\.50 ", printed, re.MULTILINE)


@pytest.mark.long
def test_save_overhead(model: Path, tmp_path: Path) -> None:
    data = write_texts(tmp_path / "data.jsonl", 60)
    words = ["--model", str(model), "--data", str(data), "--sequence", "32", "--rounds", "1"]
    assert re.search(r"median \d", run("-m", "benchmarks.save_overhead", *words))


def test_accelerator_check_on_the_cpu(
    rank_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """All checks, with the runs that torchrun would start on the ranks of the pool: most of their time is imports."""
    started: list[int] = []

    def on_the_pool(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "torch.distributed.run" not in command:
            return subprocess.run(command, **options)
        start = command.index("train_fsdp2.py")
        (ranks,) = (int(word.partition("=")[2]) for word in command[:start] if word.startswith("--nproc_per_node="))
        started.append(ranks)
        codes = rank_pool.run("tests.docs.rows:train_in", ranks=ranks, folder=str(ROOT), argv=command[start + 1 :])
        return subprocess.CompletedProcess(command, max(codes), stdout="", stderr="")

    monkeypatch.setattr(accelerator_check, "subprocess", SimpleNamespace(run=on_the_pool))
    monkeypatch.setattr(sys, "argv", ["accelerator_check.py", "--ranks", "2", "--out", str(tmp_path / "out")])
    assert accelerator_check.main() == 0
    printed = capfd.readouterr().out
    assert "FAILED" not in printed
    assert printed.count(": ok: ") == 5, printed
    assert started == [2, 1, 1, 2, 2, 2, 2]


@pytest.mark.long
def test_accelerator_check_with_torchrun(tmp_path: Path) -> None:
    printed = run("scripts/accelerator_check.py", "--ranks", "2", "--out", str(tmp_path / "out"), timeout=500)
    assert "FAILED" not in printed
    assert printed.count(": ok: ") == 5, printed
