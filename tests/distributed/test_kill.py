"""Ranks that are killed: nothing is lost that was published, and the ranks that are left say who is gone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.kill import kill_while_saving
from tests.support.runs import save_model, text_data, write_config, write_texts


# Three kills and one seed; `python -m tests.support.kill --kills 20` is for a longer sitting.
@pytest.mark.distributed
@pytest.mark.parametrize(("kills", "asynchronous"), [(2, False), (1, True)])
def test_all_ranks_killed_inside_a_save(tmp_path: Path, kills: int, asynchronous: bool) -> None:
    lines = kill_while_saving(tmp_path, kills=kills, seed=0, asynchronous=asynchronous)
    assert len(lines) == kills


@pytest.mark.torchrun
@pytest.mark.sampled(2)
@pytest.mark.parametrize("lost", [0, 1])
def test_one_rank_killed(tmp_path: Path, repository: Path, lost: int) -> None:
    model = save_model(tmp_path / "model", "llama_uneven")
    data = text_data(write_texts(tmp_path / "data.jsonl", 50), manager="lf")
    config = write_config(tmp_path / "run", model, data, stage="pt", max_steps=100_000, save_steps=50)
    output = tmp_path / "output.txt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    with output.open("w") as stream:
        torchrun = subprocess.Popen(
            [*command, "train_fsdp2.py", config],
            cwd=repository,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        try:
            metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
            while not (metrics.exists() and metrics.read_text().count("\n") > 2):
                assert time.monotonic() < deadline and torchrun.poll() is None, output.read_text()
                time.sleep(0.1)
            ranks = {int(child.environ()["RANK"]): child for child in psutil.Process(torchrun.pid).children()}
            assert set(ranks) == {0, 1}
            ranks[lost].send_signal(signal.SIGKILL)
            code = torchrun.wait(timeout=60)
        finally:
            for process in psutil.Process().children(recursive=True) if torchrun.poll() is None else []:
                if process.is_running() and "train_fsdp2.py" in " ".join(process.cmdline()):
                    process.kill()
    text = output.read_text()
    assert code != 0
    # The rank that is left says it in its own words, and torchrun in a table.
    assert re.search(rf"^rank {1 - lost}: lost rank {lost}\b", text, re.MULTILINE), text
    assert re.search(rf"rank +: {lost} \(local_rank: {lost}\)\s+exitcode +: -9", text), text
