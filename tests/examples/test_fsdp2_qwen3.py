"""The Qwen3 examples: every YAML passes the checks, every script starts what its header says, exit codes survive."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mindspeed_llm.fsdp2.config import check_config, parse_command_line

# Names that users know, with the devices of the script and the micro batch.
EXAMPLES = {
    "pretrain_qwen3_1point7b_4k_fsdp2_A2": (4, 4),
    "pretrain_qwen3_8b_4k_fsdp2_A2": (8, 1),
    "pretrain_qwen3_8b_4k_fsdp2_A3": (16, 1),
    "pretrain_qwen3_14b_4k_fsdp2_A2": (8, 1),
    "pretrain_qwen3_14b_4k_fsdp2_A3": (16, 1),
    "pretrain_qwen3_32b_4k_fsdp2_A3": (16, 1),
    "tune_qwen3_1point7b_4k_fsdp2_A2": (4, 4),
    "tune_qwen3_8b_4k_fsdp2_A2": (8, 1),
}
FOLDER = Path("examples/fsdp2/qwen3")
FAKE_TORCHRUN = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$ARGUMENTS"
echo "loss line"
exit "${FAKE_EXIT:-0}"
"""


@pytest.fixture
def workplace(tmp_path: Path, repository: Path) -> Path:
    """A copy of the examples beside a model directory, and a `torchrun` that notes its arguments."""
    shutil.copytree(repository / "examples" / "fsdp2", tmp_path / "examples" / "fsdp2")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").write_text(FAKE_TORCHRUN)
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (model / "model.safetensors").touch()
    return tmp_path


def run_script(workplace: Path, stem: str, *options: str, **environment: str) -> tuple[int, str, list[str]]:
    """Run a script with the fake torchrun; exit code, output and the arguments of torchrun."""
    kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    done = subprocess.run(
        ["bash", str(workplace / FOLDER / f"{stem}.sh"), *options],
        env=kept
        | {"PATH": f"{workplace / 'bin'}:{kept['PATH']}", "ARGUMENTS": str(workplace / "arguments")}
        | environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, (workplace / "arguments").read_text().splitlines()


def test_the_names_are_those_that_users_know(repository: Path) -> None:
    names = sorted(path.name for path in (repository / FOLDER).iterdir())
    assert names == sorted(f"{stem}.{suffix}" for stem in EXAMPLES for suffix in ("sh", "yaml"))


@pytest.mark.parametrize("stem", EXAMPLES)
def test_script_starts_a_run_that_passes_the_checks(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, stem: str
) -> None:
    devices, micro_batch = EXAMPLES[stem]
    code, output, arguments = run_script(workplace, stem, MODEL_PATH="./model")
    assert code == 0, output
    assert arguments[:10] == [
        "--nproc_per_node", str(devices), "--nnodes", "1", "--node_rank", "0",
        "--master_addr", "localhost", "--master_port", "6499",
    ]  # fmt: skip
    assert arguments[10:12] == ["train_fsdp2.py", str(FOLDER / f"{stem}.yaml")]
    monkeypatch.chdir(workplace)
    config = parse_command_line(arguments[11:]).config
    check_config(config, world_size=devices)
    assert config.parallel.fsdp_size == devices
    assert config.training.per_device_train_batch_size == micro_batch
    assert config.data.cutoff_len == 4096
    if stem.startswith("pretrain"):
        assert (config.training.stage, config.data.data_manager_type) == ("pt", "mg")
        assert config.data.dataset == {"file_name": "./dataset/train-00000-of-00001.parquet"}
    else:
        assert (config.training.stage, config.data.data_manager_type) == ("sft", "lf")
        assert config.data.dataset == "alpaca_full"


def test_environment_and_options_override_the_script(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, output, arguments = run_script(
        workplace, "tune_qwen3_8b_4k_fsdp2_A2", "--training.max_steps", "7", "--parallel.fsdp_size=2",
        NPUS_PER_NODE="2", NNODES="2", NODE_RANK="1", MASTER_ADDR="host", MASTER_PORT="1234", MODEL_PATH="./model",
        DATASET='{"file_name": "a.jsonl"}', OUTPUT_DIR="./out", MBS="3", GA="5",
    )  # fmt: skip
    assert code == 0, output
    assert arguments[:10] == [
        "--nproc_per_node", "2", "--nnodes", "2", "--node_rank", "1", "--master_addr", "host", "--master_port", "1234",
    ]  # fmt: skip
    monkeypatch.chdir(workplace)
    config = parse_command_line(arguments[11:]).config
    assert config.parallel.fsdp_size == 2
    assert config.data.dataset == {"file_name": "a.jsonl"}
    assert config.training.output_dir == "./out"
    training = config.training
    assert (training.max_steps, training.per_device_train_batch_size, training.gradient_accumulation_steps) == (7, 3, 5)


def test_tee_keeps_the_log_and_does_not_hide_the_exit_code(workplace: Path) -> None:
    code, output, _ = run_script(workplace, "pretrain_qwen3_8b_4k_fsdp2_A2", FAKE_EXIT="3")
    assert code == 3
    assert "loss line" in output
    (log,) = (workplace / "logs").glob("pretrain_qwen3_8b_4k_*.log")
    assert log.read_text() == "loss line\n"


@pytest.mark.parametrize("stem", EXAMPLES)
def test_headers_name_commands_that_exist(repository: Path, stem: str) -> None:
    for suffix in ("yaml", "sh"):
        text = (repository / FOLDER / f"{stem}.{suffix}").read_text(encoding="utf-8")
        header = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
        commands = [line for line in header if line.startswith(("bash ", "torchrun "))]
        assert commands[0].startswith(f"bash {FOLDER}/{stem}.sh")
        named = {word for command in commands for word in re.findall(r"[\w/.-]+\.(?:sh|yaml|py)", command)}
        assert [word for word in named if not (repository / word).is_file()] == []
    yaml_header = (repository / FOLDER / f"{stem}.yaml").read_text(encoding="utf-8")
    assert f"torchrun --nproc_per_node {EXAMPLES[stem][0]} train_fsdp2.py {FOLDER}/{stem}.yaml" in yaml_header


def test_env_config_keeps_what_the_user_has_set(repository: Path) -> None:
    script = "set -eu; source examples/fsdp2/env_config.sh; echo $HCCL_CONNECT_TIMEOUT $TASK_QUEUE_ENABLE"
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": os.environ["PATH"], "HCCL_CONNECT_TIMEOUT": "60"},
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "60 2\n"
