"""Command lines of `preprocess_data.py` that users type today: with --check as they stand, and for real on toy data."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command.main import main
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from tests.support.command_line import RECORDS, environment, write_jsonl
from tests.support.tokenizers import byte_tokenizer

HERE = Path(__file__).parent
COMMANDS = yaml.safe_load((HERE / "preprocess" / "commands.yaml").read_text(encoding="utf-8"))
CHATML = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the model directories and data files that the commands name; logging is as before afterwards."""
    bos, eos = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    models = {
        "qwen3_hf": byte_tokenizer(CHATML, bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>"),
        "deepseek3-hf": byte_tokenizer(DEEPSEEK, bos_token=bos, eos_token=eos, pad_token=eos),
        "deepseek4-hf": byte_tokenizer(DEEPSEEK, bos_token=bos, eos_token=eos, pad_token=eos),
    }
    for name, tokenizer in models.items():
        tokenizer.save_pretrained(tmp_path / "model_from_hf" / name)
    data = tmp_path / "dataset"
    data.mkdir()
    texts = [f"Article {i}. " + "Facts and more facts. " * (i % 9) for i in range(40)]
    Dataset.from_dict({"text": texts}).to_parquet(data / "train-00000-of-00042-xxx.parquet")
    Dataset.from_list(RECORDS).to_parquet(data / "alpaca.parquet")
    pairs = [{"system": "", "question": f"Q{i}?", "chosen": "yes", "rejected": "no"} for i in range(9)]
    write_jsonl(data / "orca_rlhf.jsonl", pairs)
    info = {name: {"file_name": "alpaca.parquet"} for name in ("alpaca_full", "alpaca_more")}
    (data / "dataset_info.json").write_text(json.dumps(info))
    monkeypatch.chdir(tmp_path)
    logger = logging.getLogger("mindspeed_llm")
    before = logger.handlers[:], logger.level, logger.propagate
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    logger.handlers[:], logger.level, logger.propagate = before
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("command", COMMANDS, ids=[command["name"] for command in COMMANDS])
def test_command(command: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    argv = shlex.split(command["argv"])
    if "refused" in command:
        with pytest.raises(UserError) as error:
            main(argv)
        assert [part for part in command["refused"] if part not in str(error.value)] == []
        return
    before = sorted(Path().rglob("*"))
    assert main([*argv, "--check"]) == 0
    plan = capsys.readouterr().out
    assert [words for words in command["plan"] if words not in plan] == []
    assert sorted(Path().rglob("*")) == before
    assert main(argv) == 0
    assert sorted(str(path.with_suffix("")) for path in Path().rglob("*.idx")) == command["files"]
    assert all(len(IndexedReader(prefix)) for prefix in command["files"])
    assert "samples written" in capsys.readouterr().out


EXAMPLES = {
    "data_convert_qwen3_pretrain": ["dataset/enwiki_text_document"],
    "data_convert_qwen3_instruction": [
        f"finetune_dataset/alpaca_packed_{key}_document" for key in ("attention_mask", "input_ids", "labels")
    ],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_scripts(name: str, workplace: Path, repository: Path) -> None:
    """Each runs as it is, takes its paths from the environment, hands further flags on, and keeps the exit code."""
    script = workplace / "examples" / "mcore" / "qwen3" / f"{name}.sh"
    shutil.copytree(repository / "examples" / "mcore", workplace / "examples" / "mcore")
    shutil.copy(repository / "preprocess_data.py", workplace)
    data = workplace / "dataset"
    shutil.copy(data / "train-00000-of-00042-xxx.parquet", data / "train-00000-of-00042.parquet")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def run(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        variables = environment(repository, PATH=path, **variables)
        return subprocess.run(["bash", str(script), *flags], cwd="/", env=variables, capture_output=True, text=True)

    done = run()
    assert done.returncode == 0, done.stderr
    found = sorted(str(file.relative_to(workplace).with_suffix("")) for file in workplace.rglob("*.idx"))
    assert found == EXAMPLES[name]
    other = run("--max-samples", "3", OUTPUT_PREFIX=str(workplace / "other" / "x"), WORKERS="1")
    assert other.returncode == 0 and "records read       3\n" in other.stdout
    wrong = run("--prompt-tpye", "x")
    assert wrong.returncode == 2 and "did you mean --prompt-type?" in wrong.stderr
