"""Checkpoints of the Megatron backend answer without any flag but --load, on whatever ranks they were written.

They are written by training at a learning rate of zero, so that the weights are still those of the Hugging Face
directory that training began with: what they answer is what transformers computes with it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pool import RankPool
from tests.support.toys import VOCABULARY
from tests.tasks.models import families

pytestmark = pytest.mark.distributed
TRAIN, ASK = "tests.training.checkpointing.rows:train", "tests.tasks.inference.megatron_rows:ask_checkpoint"
TP, PP, EP = (f"--{name}-model-parallel-size" for name in ("tensor", "pipeline", "expert"))
VPP = "--num-layers-per-virtual-pipeline-stage"
STILL = ("--lr", "0", "--min-lr", "0")
LORA = ("--lora-target-modules", "linear_q", "linear_v", "linear_proj", "--lora-r", "4", "--lora-alpha", "12")
# Toy, ranks and flags of training; ranks and flags of generation, for a checkpoint of each format.
ROWS: dict[str, tuple[str, int, list[str], int, list[str]]] = {
    "tp2 to one rank": ("qwen25-tied-windows", 2, [TP, "2", "--sequence-parallel"], 1, []),
    "virtual stages to tp2": ("qwen3", 2, [PP, "2", VPP, "1", "--noop-layers", "1,4"], 2, [TP, "2"]),
    "ep2 to pp2": ("qwen3-moe", 2, [EP, "2", "--moe-grouped-gemm"], 2, [PP, "2"]),
}


class Folders:
    """Toys with what transformers computes, and checkpoints of them; made when they are first asked for."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder

    def toy(self, name: str) -> Path:
        folder = self._folder / name
        if not folder.exists():
            model = families.build(name)
            model.save_pretrained(folder)
            save_reference(model, folder)
        return folder

    def trained(self, name: str, ranks: int, flags: Sequence[str], *, steps: int = 1, saves: Sequence[Any]) -> None:
        for answer in self._pool.run(
            TRAIN,
            ranks=ranks,
            folder=str(self.toy(name)),
            vocabulary=VOCABULARY,
            steps=steps,
            flags=list(flags),
            saves=[(step, kind, str(target)) for step, kind, target in saves],
        ):
            assert answer["error"] is None, answer["error"]

    def ask(self, flags: Sequence[Any], *, ranks: int = 1, reference: Path | None = None) -> list[dict[str, Any]]:
        return self._pool.run(
            ASK, ranks=ranks, flags=list(map(str, flags)), reference=None if reference is None else str(reference)
        )


def save_reference(model: Any, folder: Path) -> None:
    ids = families.token_ids()
    folder.mkdir(exist_ok=True)
    with torch.no_grad():
        torch.save({"ids": ids, "logits": model(ids).logits}, folder / "reference.pt")


@pytest.fixture(scope="module")
def folders(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(rank_pool, tmp_path_factory.mktemp("generation"))


@pytest.mark.parametrize("name", ROWS)
def test_checkpoints_answer_on_other_ranks(folders: Folders, tmp_path: Path, name: str) -> None:
    toy, ranks, flags, others, other_flags = ROWS[name]
    saves = [(1, kind, tmp_path / kind) for kind in ("torch", "torch_dist")]
    folders.trained(toy, ranks, [*flags, *STILL], saves=saves)
    for _, kind, folder in saves:
        for found in folders.ask(["--load", folder, *other_flags], ranks=others, reference=folders.toy(toy)):
            assert found["error"] is None, (kind, found["error"])
            assert max(found["errors"].values()) < 1e-5, (kind, found["errors"])
            assert (found["vocab_size"], found["dtype"]) == (VOCABULARY, torch.float32)
            assert " --hidden-size 48 " in found["text"] and str(folder / "iter_0000001") in found["text"]


def test_one_checkpoint_of_several_and_flags_that_contradict(folders: Folders, tmp_path: Path) -> None:
    reference = folders.toy("llama2")
    folders.trained("llama2", 1, STILL, saves=[(1, "torch", tmp_path), (2, "torch_dist", tmp_path)], steps=2)
    # A whole one is taken where the newest is damaged; one by its path; one by its step, at 16 bits.
    (newest,) = (tmp_path / "iter_0000002").glob("__0_0.distcp")
    newest.write_bytes(newest.read_bytes()[:-1])
    for flags in (
        ["--load", tmp_path],
        ["--load", tmp_path / "iter_0000001"],
        ["--load", tmp_path, "--ckpt-step", "1", "--num-layers", "4", "--rotary-base", "10000"],
    ):
        (found,) = folders.ask(flags, reference=reference)
        assert found["error"] is None
        assert max(found["errors"].values()) < 1e-5
    (found,) = folders.ask(["--load", tmp_path, "--bf16"], reference=reference)
    assert found["dtype"] == torch.bfloat16
    assert 1e-3 < max(found["errors"].values()) < 1
    for flags, message in (
        (["--num-layers", "3"], "--num-layers 3 (the checkpoint: 4)"),
        (["--swiglu", "--rotary-base", "5000"], "--rotary-base 5000.0 (the checkpoint: 10000.0)"),
        (["--ckpt-step", "7"], "iter_0000007 holds no checkpoint; steps that are there: 1, 2"),
        (["--lora-target-modules", "linear_qkv"], "holds no adapters; name their folder with --lora-load"),
    ):
        (found,) = folders.ask(["--load", tmp_path, *flags])
        assert message in found["error"]
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "iter_0000001", moved)
    (found,) = folders.ask(["--load", moved])
    assert "moved holds rank files; expected the folder that has iter_" in found["error"]


def test_adapters_answer_as_peft_does(folders: Folders, tmp_path: Path) -> None:
    from peft import PeftModel

    toy = folders.toy("llama2")
    run = tmp_path / "run"
    rates = ("--lr", "3e-2", "--min-lr", "3e-2")
    flags = [TP, "2", *LORA, *rates, "--save", str(run), "--save-lora-to-hf", "--hf-cfg-dir", str(toy)]
    folders.trained("llama2", 2, flags, steps=3, saves=[(3, "torch_dist", run)])
    adapter = run / "iter_0000003" / "hf_adapter"
    adapted = PeftModel.from_pretrained(families.build("llama2"), str(adapter))
    save_reference(adapted, tmp_path)
    before = torch.load(toy / "reference.pt")["logits"]
    assert (torch.load(tmp_path / "reference.pt")["logits"] - before).abs().max() > 0.1 * before.std()
    for ranks, asked in (
        (1, ["--load", run]),
        (2, ["--load", toy, "--lora-load", run, PP, "2"]),
        (1, ["--load", toy, "--lora-load", adapter]),
        (1, ["--load", run, "--lora-load", adapter, "--model-from-hf", toy]),
    ):
        for found in folders.ask(asked, ranks=ranks, reference=tmp_path):
            assert found["error"] is None, found["error"]
            assert max(found["errors"].values()) < 1e-5, asked
    (found,) = folders.ask(["--load", run, "--lora-r", "8"])
    assert "--lora-r 4, this run has 8; give --lora-r 4" in found["error"]
