"""A toy with real weights and a tokenizer, and evaluations of it on ranks of the pool."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mindspeed_llm.tasks.evaluation.ranks import Ranks
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


def evaluate_with_lm_eval(argv: list[str]) -> None:
    """The command that runs lm-eval's tasks, as one rank of torchrun would run it."""
    from mindspeed_llm.tasks.evaluation.lm_eval_adapter import main

    assert main(argv) == 0


def files(folder: Path) -> tuple[bytes, list[dict]]:
    """results.json, and the rows of samples.jsonl."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return (folder / "results.json").read_bytes(), rows


def wait_for_the_last() -> tuple[list[int], list[int], float]:
    """What rank 1, late twice, and rank 0 have gathered; when this rank went on behind a judge that took its time."""
    ranks = Ranks()
    ranks._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    pause = 2.5 * ranks.rank
    time.sleep(pause)
    on_first = ranks.gather(ranks.rank)
    time.sleep(pause)
    everywhere = ranks.gather_everywhere(ranks.rank)
    if ranks.rank == 0:
        time.sleep(0.5)
    told = time.monotonic()
    ranks.follow("block 0", leads=ranks.rank == 0)
    return on_first, everywhere, told if ranks.rank == 0 else time.monotonic()
