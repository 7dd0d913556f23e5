"""Command lines of training that users type today, at full size: --check takes them as they stand."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mindspeed_llm.tasks.posttrain.main import main as posttrain
from mindspeed_llm.tasks.preprocess.command.main import main as preprocess
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedWriter
from mindspeed_llm.training.main import main as pretrain
from tests.support.tokenizers import byte_tokenizer

HERE = Path(__file__).parent
COMMANDS = yaml.safe_load((HERE / "mcore" / "commands.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tokenizer and the data that the commands name."""
    byte_tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>").save_pretrained(
        tmp_path / "model_from_hf" / "qwen3_hf"
    )
    (tmp_path / "dataset").mkdir()
    with IndexedWriter(tmp_path / "dataset" / "enwiki_text_document") as writer:
        for _ in range(4):
            writer.add(np.arange(5000) % 250)
    monkeypatch.chdir(tmp_path)
    # Looked into only when the run starts.
    (tmp_path / "model_weights" / "qwen3_mcore").mkdir(parents=True)
    (tmp_path / "finetune_dataset").mkdir()
    records = [{"instruction": f"Say {word}.", "input": "", "output": f"{word}!"} for word in ["one", "two", "three"]]
    file = tmp_path / "finetune_dataset" / "alpaca.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    line = (
        "--input finetune_dataset/alpaca.jsonl --tokenizer-name-or-path model_from_hf/qwen3_hf --prompt-type qwen3 "
        "--handler-name AlpacaStyleInstructionHandler --enable-thinking true --output-prefix finetune_dataset/alpaca"
    )
    assert preprocess(line.split()) == 0
    return tmp_path


@pytest.mark.usefixtures("workplace", "logging_as_before")
@pytest.mark.parametrize("command", COMMANDS, ids=[command["name"] for command in COMMANDS])
def test_command(command: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    main = {"posttrain_gpt.py": posttrain}.get(command.get("program"), pretrain)
    assert main([*shlex.split(command["argv"]), "--check", str(command["ranks"])]) == 0
    out = capsys.readouterr().out
    text = re.sub(" +", " ", out)
    assert [words for words in command["plan"] if words not in text] == []
    assert sorted(re.findall(r">> (--\S+) has no effect", out)) == sorted(command["no_effect"])
    assert out.endswith("The arguments are valid.\n")
