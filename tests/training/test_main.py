"""`pretrain_gpt.py` up to the point where training starts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedWriter
from mindspeed_llm.training import pretrain
from mindspeed_llm.training.main import main
from tests.support.tokenizers import byte_tokenizer
from tests.training.arguments.lines import DENSE
from tests.training.arguments.test_model_from_hf import save_config

pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The prefix of an indexed file of 40 documents."""
    with IndexedWriter(tmp_path / "data") as writer:
        for number in range(40):
            writer.add(np.arange(60 + number) % 250)
    return tmp_path / "data"


def test_check_prints_the_plan_and_starts_nothing(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pretrain, "pretrain", lambda *_: pytest.fail("training was started"))
    line = DENSE.replace("--mock-data", f"--data-path {data} --split 90,10,0 --eval-iters 1")
    flags = "--check --pipeline-model-parallel-size 2 --global-batch-size 8 --use-mcore-models"
    assert main(shlex.split(f"{line} {flags}")) == 0
    out = capsys.readouterr().out
    assert "--use-mcore-models has no effect: there is one kind of model" in out
    # 4 layers of 96 norms, 160 x 48 + 48 x 96 attention and 3 x 88 x 48 MLP; norm; two ends of 509 x 48.
    parameters = 4 * (96 + 160 * 48 + 48 * 96 + 3 * 88 * 48) + 48 + 2 * 509 * 48
    assert f"  parameters     {parameters:,}\n" in out
    assert "Ranks            2 = TP 1 x PP 2 x DP 1\n" in out
    assert "  bubble         12.5% of the time" in out
    assert "stage 0: layers 0-1 (embedding)" in out
    assert out.endswith("The arguments are valid.\n")


def test_check_looks_at_the_data(tmp_path: Path) -> None:
    line = DENSE.replace("--mock-data", f"--data-path {tmp_path / 'none'}")
    with pytest.raises(UserError, match=r"--data-path: .*none is neither the prefix of"):
        main(shlex.split(f"{line} --check"))


def test_check_takes_the_vocabulary_of_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    line = DENSE.replace("--vocab-size 509", f"--tokenizer-name-or-path {tmp_path}")
    assert main(shlex.split(f"{line} --check")) == 0
    padded = -(-len(tokenizer) // 128) * 128
    assert f"  vocabulary     {len(tokenizer)}, padded to {padded}\n" in capsys.readouterr().out


def test_check_of_a_hugging_face_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_config(tmp_path, "qwen3")
    rest = "--seq-length 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"
    assert main(shlex.split(f"--model-from-hf {folder} {rest} --check 2")) == 0
    out = capsys.readouterr().out
    assert f"--model-from-hf {folder} (Qwen3ForCausalLM) sets:\n  --num-layers 4 " in out
    assert "Ranks            2 = TP 1 x PP 1 x DP 2\n" in out


def test_listing_features(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(f"{DENSE} --num-layers 6 --noop-layers 0,5 --list-features")) == 0
    rows = [row.split("\t") for row in capsys.readouterr().out.splitlines()]
    states = {row[0]: row[2] for row in rows}
    assert states["noop_layers"] == "on"
    assert states["num_layer_list"] == "off"


def test_training_gets_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(pretrain, "pretrain", lambda args, task: seen.append(args) or 7)
    assert main(shlex.split(DENSE)) == 7
    assert (seen[0].padded_vocab_size, seen[0].data_parallel_size) == (512, 1)


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(shlex.split(f"{DENSE} --check")) == 0
    assert main(shlex.split(f"{DENSE} --list-features")) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layrs 3", "error: unknown flag --num-layrs; did you mean --num-layers? --help shows all flags\n"),
        (
            "--tensor-model-parallel-size 4",
            "error: the number of ranks is 1, no multiple of --tensor-model-parallel-size 4 x "
            "--pipeline-model-parallel-size 1 = 4; start a multiple of it, or lower one of the sizes\n",
        ),
    ],
)
def test_a_mistake_ends_the_command_with_code_2_at_once(repository: Path, flags: str, message: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *shlex.split(f"{DENSE} {flags}")],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
    assert time.monotonic() - start < 10
