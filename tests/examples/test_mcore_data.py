"""The scripts that make data for the Megatron backend: each runs as it is, on toy data.

A script starts `python`, for which a stand-in notes the arguments; the command is then run in this process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mindspeed_llm.tasks.preprocess.command.main import main
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from tests.support.command_line import RECORDS, write_jsonl
from tests.support.tokenizers import chatml_tokenizer

FOLDER = Path("examples/mcore")
FAKE_PYTHON = '#!/usr/bin/env bash\nprintf \'%s\\n\' "$@" > "$ARGUMENTS"\n'
KEYS = ("attention_mask", "input_ids", "labels")
INSTRUCTION = [f"finetune_dataset/alpaca_packed_{key}_document" for key in KEYS]
PRETRAIN = ["dataset/enwiki_text_document"]
# Script -> (data, the files that it makes). Those of qwen3 are tried by tests/commands.
SCRIPTS: dict[str, tuple[str, list[str]]] = {
    "qwen25/data_convert_qwen25_pretrain": ("text", PRETRAIN),
    "qwen25/data_convert_qwen25_instruction": ("alpaca", INSTRUCTION),
    "llama2/data_convert_llama2_instruction": ("alpaca", INSTRUCTION),
    "qwen3_moe/data_convert_qwen3_moe_pretrain": ("text", PRETRAIN),
    "qwen3_moe/data_convert_qwen3_moe_instruction": ("alpaca", INSTRUCTION),
    "qwen3_moe/data_convert_qwen3_moe_instruction_pack": (
        "alpaca",
        [name.replace("alpaca_", "alpaca_pack_") for name in INSTRUCTION],
    ),
    "qwen3_moe/data_convert_qwen3_moe_pairwise": (
        "pairs",
        [
            f"finetune_dataset/orca_rlhf_packed_{side}_{key}_document"
            for side in ("chosen", "rejected")
            for key in ("input_ids", "labels")
        ],
    ),
}
DATA = {
    "text": [{"text": f"Article {number}. " * 4} for number in range(9)],
    "alpaca": RECORDS,
    "pairs": [{"system": "", "question": f"Q{n}?", "chosen": "yes", "rejected": "no"} for n in range(9)],
}

pytestmark = pytest.mark.usefixtures("logging_as_before")


def test_all_scripts_are_tried(repository: Path) -> None:
    folder = repository / FOLDER
    found = {str(path.relative_to(folder).with_suffix("")) for path in folder.glob("*/data_convert_*.sh")}
    assert {name for name in found if not name.startswith("qwen3/")} == SCRIPTS.keys()


@pytest.mark.parametrize("stem", SCRIPTS)
def test_script(tmp_path: Path, repository: Path, stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(repository / FOLDER, tmp_path / FOLDER)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(FAKE_PYTHON)
    (tmp_path / "bin" / "python").chmod(0o755)
    chatml_tokenizer(pad_token="<pad>").save_pretrained(tmp_path / "tokenizer")
    kind, files = SCRIPTS[stem]
    write_jsonl(tmp_path / "data.jsonl", DATA[kind])
    variables = {"INPUT": "./data.jsonl", "TOKENIZER_PATH": "./tokenizer", "WORKERS": "1"}
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", str(tmp_path / FOLDER / f"{stem}.sh"), "--max-samples", "3"],
        env={"PATH": path, "ARGUMENTS": str(tmp_path / "arguments"), **variables},
        cwd="/",
        check=True,
    )
    program, *argv = (tmp_path / "arguments").read_text().splitlines()
    assert program == "./preprocess_data.py"
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 0
    assert sorted(str(file.with_suffix("")) for file in Path().rglob("*.idx")) == files
    # Packing puts the samples into one row.
    assert all(len(IndexedReader(name)) == (1 if "_pack_" in name else 3) for name in files)
