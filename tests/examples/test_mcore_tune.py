"""The fine-tuning scripts of the Megatron backend: each passes the checks at full size and trains a toy for real."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from mindspeed_llm.tasks.posttrain.main import main
from tests.examples.mcore_models import EXAMPLES, TOY_FLAGS, save_config, save_toy_directory
from tests.examples.test_mcore_pretrain import header_command, run_script, workplace  # noqa: F401 (a fixture)
from tests.support.pool import RankPool
from tests.support.tokenizers import chatml_tokenizer
from tests.tasks.posttrain.conversations import HANDLER, make_records, write_records

PROGRAM = "posttrain_gpt.py"
# Script -> the pre-training script of the same model.
SCRIPTS = {
    "qwen3/tune_qwen3_8b_4K_full_ptd": "qwen3/pretrain_qwen3_8b_4K_ptd",
    "qwen3/tune_qwen3_8b_4K_lora_ptd": "qwen3/pretrain_qwen3_8b_4K_ptd",
}

pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture
def place(workplace: Path) -> Path:  # noqa: F811
    """With records, and a tokenizer that knows the marks of Qwen's template."""
    write_records(workplace / "records.jsonl", make_records(40))
    chatml_tokenizer(pad_token="<pad>").save_pretrained(workplace / "tokenizer")
    return workplace


def arguments_of(words: list[str]) -> list[str]:
    return words[words.index(PROGRAM) + 1 :]


@pytest.mark.parametrize("stem", SCRIPTS)
def test_full_size(place: Path, stem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    done, words = run_script(place, stem, *HANDLER, DATA_PATH="./records.jsonl", TOKENIZER_PATH="./tokenizer")
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(place)
    example = EXAMPLES[SCRIPTS[stem]]
    # It refuses flags that contradict the configuration.
    config = save_config(example, place / "model")
    for argv in (arguments_of(words), arguments_of(header_command(place / "examples/mcore" / f"{stem}.sh"))):
        own = ["--model-from-hf", str(config), "--load", str(config), "--data-path", "./records.jsonl", *HANDLER]
        own += ["--tokenizer-name-or-path", "./tokenizer"]
        (config / "model.safetensors").touch()
        assert main([*argv, "--check", "8", *own]) == 0
        out = capsys.readouterr().out
        assert f"  parameters     {example.parameters:,}" in out
        assert " has no effect" not in out


@pytest.mark.parametrize("stem", SCRIPTS)
def test_variables_of_the_header_are_those_of_the_script(repository: Path, stem: str) -> None:
    text = (repository / "examples/mcore" / f"{stem}.sh").read_text(encoding="utf-8")
    header = " ".join(line[1:].strip() for line in text.partition("set -euo")[0].splitlines())
    named = re.search(r"Environment: (.*?)\.", header)
    assert named is not None
    assert named[1].split(", ") == re.findall(r"^([A-Z_]+)=\"\$\{\1:?-", text, re.MULTILINE)
    assert f"bash examples/mcore/{stem}.sh" in header


@pytest.mark.distributed
@pytest.mark.parametrize("stem", SCRIPTS)
def test_toy_size(place: Path, stem: str, rank_pool: RankPool) -> None:
    example = EXAMPLES[SCRIPTS[stem]]
    save_toy_directory(example, place / "toy")
    environment = {
        "NPUS_PER_NODE": "2",
        "DATA_PATH": "./records.jsonl",
        "TOKENIZER_PATH": "./tokenizer",
        "CKPT_LOAD_DIR": "./toy",
        "CKPT_SAVE_DIR": "./ckpt",
        "GBS": "4",
        "SEQ_LENGTH": "128",
        "TRAIN_ITERS": "2",
    }
    _, words = run_script(place, stem, *HANDLER, *TOY_FLAGS.split(), **environment)
    argv = arguments_of(words)
    codes = rank_pool.run("tests.examples.rows:posttrain_in", ranks=2, folder=str(place), argv=argv)
    assert codes == [0, 0]
    lines = (place / "ckpt" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "lm_loss" in record]
    assert [record["iteration"] for record in records] == [1, 2]
    assert all(math.isfinite(record["lm_loss"]) and record["grad_norm"] > 0 for record in records)
    assert (place / "ckpt" / "latest_checkpointed_iteration.txt").read_text() == "2"
