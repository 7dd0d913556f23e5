"""The quick start from end to end with a toy in place of the demo model: real torchrun, two processes, two steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.workplace import save_model

ROOT = Path(__file__).parents[2]
# Stands for the environment's python: installs nothing, keeps its stamp in the test's folder, and is the real one else.
PYTHON = """#!/bin/sh
case "$*" in
*"-m pip "*) exit 0 ;;
*"print(sys.prefix)"*) echo "{folder}"; exit 0 ;;
esac
exec "{python}" "$@"
"""


def quickstart(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"VENV": str(folder / "venv"), "OUT": "out", "STEPS": "2", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", str(ROOT / "scripts/quickstart.sh")],
        cwd=folder,
        env={**os.environ, **variables, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(folder=tmp_path, python=sys.executable))
    python.chmod(0o755)
    save_model("llama_tied", tmp_path / "out/model")
    return tmp_path


@pytest.mark.torchrun
def test_trains_shows_and_keeps_the_run_before(place: Path) -> None:
    (place / "out/run").mkdir()
    (place / "out/run/of_last_time").touch()
    result = quickstart(place)
    assert result.returncode == 0, result.stdout + result.stderr
    # OUT is relative to where the command was typed.
    run = place / "out/run"
    for line in ("eval loss before  ", "eval loss after   ", f"loss curve        {run}/loss.png", "completion        "):
        assert line in result.stdout
    for file in ("model.safetensors", "config.json", "tokenizer.json", "metrics.jsonl", "loss.png"):
        assert (run / file).is_file()
    assert (place / "out/run.previous/of_last_time").exists()
    assert not list(place.rglob("*.partial"))


@pytest.mark.torchrun
def test_a_failed_training_is_named_and_set_aside(place: Path) -> None:
    (place / "out/model/model.safetensors").write_bytes(b"damaged")
    result = quickstart(place, NPROC="1")
    assert result.returncode != 0
    assert "failed at: training" in result.stderr
    assert "model.safetensors" in result.stdout + result.stderr
    assert not (place / "out/run").exists()
    assert "eval loss" not in result.stdout
