"""Real command lines of `train_fsdp2.py` in a folder that looks like a user's, at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from datasets import Dataset

from tests.support.tokenizers import chatml_tokenizer
from tests.support.toys import save_toy

MODEL = Path("model_from_hf") / "qwen3_hf"
TEXTS = [f"Text number {i}: " + "the quick brown fox jumps over the lazy dog. " * (1 + i % 4) for i in range(48)]
RECORDS = [
    {"instruction": f"Say {word}.", "input": "twice" if i % 3 == 0 else "", "output": f"{word} " * (1 + i % 3)}
    for i, word in enumerate(["red", "green", "blue", "yellow"] * 8)
]


def make_workplace(folder: Path) -> Path:
    """A folder with a toy Qwen3 model directory and the data files that the canonical configurations name."""
    save_toy("qwen3", folder / MODEL)
    chatml_tokenizer().save_pretrained(folder / MODEL)
    (folder / "dataset").mkdir()
    Dataset.from_dict({"text": TEXTS}).to_parquet(folder / "dataset" / "train-00000-of-00001.parquet")
    Dataset.from_list(RECORDS).to_parquet(folder / "alpaca.parquet")
    write_jsonl(folder / "alpaca.jsonl", RECORDS)
    return folder


def write_jsonl(path: Path, records: Sequence[Mapping[str, object]]) -> Path:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def environment(repository: Path, **variables: str) -> dict[str, str]:
    """This process's environment without what a launcher sets, one thread per process, on the CPU."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MINDSPEED_DEBUG")
    inherited = {name: value for name, value in os.environ.items() if name not in launcher}
    ours = {"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1", "MINDSPEED_DEVICE": "cpu"}
    return inherited | ours | variables


def torchrun(repository: Path, workplace: Path, *argv: str, ranks: int = 2) -> subprocess.Popen[str]:
    """Start `train_fsdp2.py` on `ranks` ranks in the workplace, as the leader of a process group of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return subprocess.Popen(
        [*launcher, str(repository / "train_fsdp2.py"), *argv],
        cwd=workplace,
        env=environment(repository),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# Runs the root script and notes which of the big libraries it had imported by its end.
_WATCHED = """
import atexit, runpy, sys
note, script = sys.argv[1:3]
big = {"torch", "transformers"}
atexit.register(lambda: open(note, "w").write(" ".join(sorted(big & set(sys.modules)))))
sys.argv = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
"""


def single(
    repository: Path, workplace: Path, *argv: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run `train_fsdp2.py` in one process; the finished process, and which of torch and transformers it imported."""
    note = workplace / "imported"
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED, str(note), str(repository / "train_fsdp2.py"), *argv],
        cwd=workplace,
        env=environment(repository, **variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done, set(note.read_text().split())
