"""Whole runs of `posttrain_gpt.py`: interrupted and gone on with, evaluated, compared with the other backend."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.pool import RankPool
from tests.support.reference import RECIPE, relative
from tests.support.runs import RECIPE_FIELDS, metrics, write_config
from tests.support.toys import save_toy
from tests.tasks.posttrain.conversations import HANDLER, make_records, make_tokenizer, rendered, write_records

pytestmark = pytest.mark.distributed
ROW, FSDP2 = "tests.tasks.posttrain.rows:finetune", "tests.distributed.runs:train"
COUNT, LENGTH, GLOBAL_BATCH, STEPS = 60, 128, 8, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with its tokenizer, and records beside it."""
    folder = tmp_path_factory.mktemp("runs")
    save_toy("qwen3", folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    write_records(folder / "raw.jsonl", make_records(COUNT, turns=2))
    return folder


def run(pool: RankPool, folder: Path, name: str, ranks: int, flags: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in `folder / name`."""
    model, output = folder / "model", folder / name
    line = (
        f"--stage sft --model-from-hf {model} --data-path {folder / 'raw.jsonl'} --tokenizer-name-or-path {model} "
        f"--seq-length {LENGTH} --micro-batch-size 2 --global-batch-size {GLOBAL_BATCH} --train-iters {STEPS} "
        f"--lr {RECIPE['lr']} --lr-decay-style constant --adam-beta1 {RECIPE['betas'][0]} "
        f"--adam-beta2 {RECIPE['betas'][1]} --adam-eps {RECIPE['eps']} --weight-decay {RECIPE['weight_decay']} "
        f"--clip-grad {RECIPE['clip']} --hidden-dropout 0 --attention-dropout 0 --make-vocab-size-divisible-by 4 "
        f"--use-flash-attn --no-pad-to-seq-lengths --log-interval 1 --metrics-dir {output} --seed 7 {flags}"
    )
    assert pool.run(ROW, ranks=ranks, argv=[*shlex.split(line), *HANDLER]) == [0] * ranks
    return [json.loads(text) for text in (output / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_where_it_was_with_other_ranks(rank_pool: RankPool, folder: Path) -> None:
    """Two ranks begin, one goes on: no sample is left out, none comes twice."""
    start, data = f"--load {folder / 'model'}", "--split 100,0,0 --eval-iters 0"
    whole = run(rank_pool, folder, "whole", 1, f"{start} {data}")
    save = f"--save {folder / 'ckpt'} --ckpt-format torch_dist"
    run(rank_pool, folder, "parts", 2, f"{start} {data} {save} --exit-interval 3 --pipeline-model-parallel-size 2")
    run(rank_pool, folder, "parts", 2, f"--load {folder / 'ckpt'} {data} {save}")
    parts = metrics(folder / "parts")
    assert [line["iteration"] for line in parts] == list(range(1, STEPS + 1))
    assert len({round(line["lm_loss"], 3) for line in whole}) == STEPS
    for mine, theirs in zip(parts, whole, strict=True):
        assert relative(mine["lm_loss"], theirs["lm_loss"]) < 1e-5
        assert mine["consumed_samples"] == theirs["consumed_samples"]
        # Rows are as long as their micro batch needs, which depends neither on the ranks nor on the parts.
        assert mine["consumed_tokens"] == theirs["consumed_tokens"]


def test_evaluation_equals_transformers(rank_pool: RankPool, folder: Path) -> None:
    """Each evaluation goes on with the held-out samples where the one before ended."""
    flags = f"--load {folder / 'model'} --lr 1e-30 --split 60,40,0 --no-shuffle --eval-interval 3 --eval-iters 1"
    lines = run(rank_pool, folder, "evaluated", 2, f"{flags} --tensor-model-parallel-size 2")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    held_out = [rendered(record) for record in make_records(COUNT, turns=2)][36:]
    expected = []
    for first in (0, GLOBAL_BATCH):
        total, targets = 0.0, 0
        for ids, labels in held_out[first : first + GLOBAL_BATCH]:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
            wanted = torch.tensor(labels[1:])
            total += torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum").item()
            targets += int((wanted != -100).sum())
        expected.append((pytest.approx(total / targets, rel=1e-5), targets))
    assert [(line["eval_loss"], line["eval_tokens"]) for line in lines if "eval_loss" in line] == expected
    # Micro batches of two samples, each as long as the longer one, rounded up to 8.
    lengths = [len(rendered(record)[0]) for record in make_records(COUNT, turns=2)[:36]]
    sizes = [lengths[place % 36] for place in range(STEPS * GLOBAL_BATCH)]
    rows = [2 * (-(-max(sizes[place : place + 2]) // 8) * 8) for place in range(0, len(sizes), 2)]
    trained = [line for line in lines if "lm_loss" in line]
    micro = GLOBAL_BATCH // 2
    assert [line["consumed_tokens"] for line in trained] == [sum(rows[: micro * (n + 1)]) for n in range(STEPS)]
    assert rows[0] != 2 * LENGTH
    for number, line in enumerate(trained):
        seconds = line["elapsed_ms_per_iteration"] / 1000
        passed = sum(rows[micro * number : micro * (number + 1)])
        assert line["tokens_per_second"] == pytest.approx(passed / seconds, rel=1e-6)


def test_both_backends_report_the_same_steps(rank_pool: RankPool, folder: Path) -> None:
    flags = f"--load {folder / 'model'} --split 100,0,0 --eval-iters 0 --pipeline-model-parallel-size 2"
    run(rank_pool, folder, "megatron", 2, f"{flags} --no-shuffle --prompt-type qwen3 --enable-thinking true")
    data = {"dataset": {"file_name": str(folder / "raw.jsonl"), "formatting": "alpaca"}, "template": "qwen3"}
    training = {
        "seed": 7,
        "disable_shuffling": True,
        "max_steps": STEPS,
        **RECIPE_FIELDS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": GLOBAL_BATCH // 4,
        "save_hf_weights": False,
    }
    config = write_config(folder / "fsdp2", folder / "model", {**data, "cutoff_len": LENGTH}, **training)
    rows = rank_pool.run(FSDP2, ranks=2, argv=[config])
    assert [(row["code"], row["error"]) for row in rows] == [(0, None)] * 2
    pairs = list(zip(metrics(folder / "megatron"), metrics(folder / "fsdp2"), strict=True))
    assert len(pairs) == STEPS
    for mine, theirs in pairs:
        assert relative(mine["lm_loss"], theirs["lm_loss"]) < 1e-5
        assert relative(mine["grad_norm"], theirs["grad_norm"]) < 1e-5
