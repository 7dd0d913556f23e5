"""All shell scripts parse, pass shellcheck, and answer wrong usage before they do anything."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("examples/**/*.sh"), ROOT / ".ci/run"])
# Sourced by others: it must not change the shell options of the shell that sources it.
SOURCED = {"common.sh", "env_config.sh"}


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def run(script: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / script), *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_all_are_found() -> None:
    found = names(SCRIPTS)
    assert {"scripts/common.sh", "scripts/quickstart.sh", "scripts/soak.sh", "scripts/test.sh"} <= set(found)
    assert "examples/fsdp2/smollm2/pretrain_smollm2_135m_cpu.sh" in found


@pytest.mark.parametrize("script", SCRIPTS, ids=names(SCRIPTS))
def test_parses_and_stops_at_the_first_error(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text(encoding="utf-8")
    if script.name not in SOURCED:
        assert text.startswith("#!/usr/bin/env bash\n")
        assert "\nset -euo pipefail\n" in text


def test_shellcheck_finds_nothing() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    command = str(shellcheck) if shellcheck.exists() else shutil.which("shellcheck")
    if command is None:
        pytest.skip("shellcheck is not installed (dev extra)")
    result = subprocess.run([command, "-x", *names(SCRIPTS)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "environment", "message"),
    [
        ("scripts/quickstart.sh", ["--hree"], {}, "unknown argument --hree"),
        ("scripts/quickstart.sh", [], {"NPROC": "two"}, "NPROC=two"),
        ("scripts/quickstart.sh", [], {"NPROC": "0"}, "NPROC=0"),
        ("scripts/quickstart.sh", [], {"STEPS": "-1"}, "STEPS=-1"),
        ("scripts/soak.sh", [], {}, "which job?"),
        ("scripts/soak.sh", ["sft_smolm2"], {}, "unknown job sft_smolm2"),
        ("scripts/soak.sh", ["sft_smollm2", "--data"], {}, "--data: expected a file"),
        ("scripts/soak.sh", ["sft_smollm2", "--data", "missing.json"], {}, "missing.json: no such file"),
        ("scripts/soak.sh", ["mcore_smollm2", "--data", "missing.json"], {}, "missing.json: no such file"),
        ("scripts/soak.sh", ["lora_smollm2", "--data", "missing.json"], {}, "missing.json: no such file"),
        ("scripts/soak.sh", ["dpo_smollm2", "--steps", "3"], {}, "dpo_smollm2: unknown option --steps"),
        ("scripts/soak.sh", ["mcore_smollm2", "--steps", "0"], {}, "--steps 0: expected a whole number above 0"),
    ],
)
def test_wrong_usage(
    script: str, arguments: list[str], environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    result = run(script, *arguments, cwd=tmp_path, **environment)
    assert result.returncode == 2
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_convert_grid_hands_its_options_on(tmp_path: Path) -> None:
    """A python that only says how it is called stands for the real one; the job's exit code is its own."""
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
case "$1 $2" in
"-c "*sys.prefix*) echo {tmp_path} ;;
"-c "*) exec {sys.executable} "$@" ;;
"-m pip") ;;
*) echo "$OMP_NUM_THREADS $*"; exit 1 ;;
esac
"""
    )
    python.chmod(0o755)
    options = ["--family", "qwen3", "--rows", "2", "--seed", "5"]
    done = run("scripts/soak.sh", "--here", "convert_grid", *options, PYTHON=str(python), VIRTUAL_ENV=str(tmp_path))
    assert done.returncode == 1
    assert f"1 -m tests.tasks.checkpoint.grid {' '.join(options)}\n" in done.stdout


@pytest.mark.parametrize("name", ["accelerator_check", "quickstart", "soak", "test"])
def test_help(name: str, tmp_path: Path) -> None:
    script = f"scripts/{name}.sh"
    result = run(script, "--help", cwd=tmp_path)
    assert result.returncode == 0
    assert f"bash {script}" in result.stdout
    assert "set -euo" not in result.stdout


def test_python_that_is_too_old_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = run("scripts/quickstart.sh", VENV=str(tmp_path / "venv"), PYTHON=str(old), OUT=str(tmp_path / "out"))
    assert result.returncode != 0
    assert "is not a Python 3.10, 3.11 or 3.12" in result.stderr
    assert not (tmp_path / "out").exists()
