"""A toy with real weights and a tokenizer, and evaluations of it on ranks of the pool."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.tokenizers import chatml_tokenizer
from tests.support.toys import build_toy

POSITIONS = 640


def write_model(folder: Path) -> Path:
    """A model directory: a toy of few layers that knows bytes."""
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": POSITIONS, "bos_token_id": 256, "eos_token_id": 257}
    build_toy("llama", **sizes).save_pretrained(folder)
    chatml_tokenizer().save_pretrained(folder)
    return folder


def evaluate(argv: list[str]) -> None:
    """The command, as one rank of torchrun would run it."""
    from mindspeed_llm.tasks.evaluation.main import main

    assert main(argv) == 0


def files(folder: Path) -> tuple[bytes, list[dict]]:
    """results.json, and the rows of samples.jsonl."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return (folder / "results.json").read_bytes(), rows
