"""A folder with a toy tokenizer and small data, and the command run in it: in this process, or in one of its own."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.tasks.preprocess.command.main import main
from tests.support.command_line import environment
from tests.support.tokenizers import chatml_tokenizer

TEXTS = [f"Document {i}: " + "words and more words. " * (i % 7) + "谢谢 🙂" * (i % 2) for i in range(60)]
RECORDS = [
    {"instruction": f"Say number {i}.", "input": "twice" if i % 3 == 0 else "", "output": "x " * (1 + i % 11)}
    for i in range(60)
]
SFT = ["--handler-name", "AlpacaStyleInstructionHandler", "--prompt-type", "qwen3"]


def write_jsonl(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def make_toys(folder: Path) -> Path:
    """`tok`, a tokenizer, `text.jsonl` and `alpaca.jsonl` in `folder`."""
    chatml_tokenizer(pad_token="<pad>").save_pretrained(folder / "tok")
    write_jsonl(folder / "text.jsonl", [{"text": text} for text in TEXTS])
    write_jsonl(folder / "alpaca.jsonl", RECORDS)
    return folder


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder, as the current one; logging and signals are as before afterwards.

    Nothing waits for the disk: hundreds of small files would take minutes.
    """
    monkeypatch.chdir(make_toys(tmp_path))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    logger = logging.getLogger("mindspeed_llm")
    before = logger.handlers[:], logger.level, logger.propagate
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    logger.handlers[:], logger.level, logger.propagate = before
    for number, handler in handlers.items():
        signal.signal(number, handler)


def preprocess(*argv: str, source: str = "alpaca.jsonl", prefix: str = "out/data") -> None:
    """Run the command in this process; the last of equal flags counts."""
    assert main(["--input", source, "--tokenizer-name-or-path", "tok", "--output-prefix", prefix, *argv]) == 0


def started(repository: Path, folder: Path, *argv: str, patch: str = "") -> subprocess.Popen[str]:
    """Start the command in a process of its own that leads a process group; `patch` is run before."""
    program = (
        "import sys\n" + patch + "\nfrom mindspeed_llm import cli\n"
        "from mindspeed_llm.tasks.preprocess.command.main import main\n"
        "cli.run(main, sys.argv[1:])\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, "--tokenizer-name-or-path", "tok", *argv],
        cwd=folder,
        env=environment(repository),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def contents(folder: Path, name: str = "data") -> dict[str, bytes]:
    """The content of all indexed files of a prefix, by what follows its name."""
    return {
        path.name.removeprefix(name): path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.name.startswith(f"{name}_") and path.suffix in (".bin", ".idx")
    }


def summary(folder: Path, name: str = "data") -> dict[str, Any]:
    """The summary of a prefix."""
    return json.loads((folder / f"{name}_summary.json").read_text(encoding="utf-8"))
