"""The same records under both training commands: the same tokens, and the same steps of preference optimisation."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.tasks.posttrain.instructions import build_instructions
from tests.fsdp2.data.helpers import build, make_config, rows_of
from tests.support.pool import RankPool
from tests.support.reference import RECIPE, relative
from tests.support.runs import RECIPE_FIELDS, write_config
from tests.support.toys import save_toy
from tests.tasks.posttrain.conversations import HANDLER, make_records, make_tokenizer, write_records
from tests.tasks.posttrain.pairs import BETA, REWARDS, save_near
from tests.tasks.posttrain.test_instructions import flags

ROW, FSDP2 = "tests.tasks.posttrain.rows:finetune", "tests.distributed.runs:train"
LENGTH, PAIRS, STEPS = 128, 4, 3


# --- tokens


@pytest.mark.parametrize(("flag", "field"), [("true", True), ("false", False), ("none", None)])
def test_thoughts_become_the_same_tokens(tmp_path: Path, flag: str, field: bool | None) -> None:
    """With a template of a reasoning model, for replies with a thought and without one."""
    records = [
        {"instruction": "a", "input": "", "output": "<think>\nhm\n</think>\n\nb"},
        {"instruction": "c", "input": "d", "output": "e"},
    ]
    raw = write_records(tmp_path / "raw.jsonl", records)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = (
        f"--tokenizer-name-or-path {tmp_path / 'tokenizer'} {' '.join(HANDLER)} --no-shuffle --prompt-type qwen3 "
        f"--seq-length {LENGTH} --max-position-embeddings {LENGTH}"
    )

    def megatron(rest: str) -> list[tuple[list[int], list[int]]]:
        rows = build_instructions(flags(raw, f"{words} {rest}")).train.rows
        samples = (rows[place] for place in range(len(records)))
        return [(sample["input_ids"].tolist(), [*sample["labels"].tolist()[1:], -100]) for sample in samples]

    def fsdp2(**fields: Any) -> list[tuple[list[int], list[int]]]:
        data = {"dataset": {"file_name": str(raw)}, "template": "qwen3", "cutoff_len": LENGTH, **fields}
        bundle = build(make_config(tmp_path, data, num_train_epochs=1, disable_shuffling=True), make_tokenizer())
        return [row for step in bundle.train.micro_batches() for batch in step for row in rows_of(batch)]

    found = megatron(f"--enable-thinking {flag}")
    assert found == fsdp2(enable_thinking=field)
    texts = [tokenizer.decode([label for label in labels if label != -100]) for _, labels in found]
    assert ["<think>" in text for text in texts] == {"true": [True, True], "false": [False, False]}.get(
        flag, [True, False]
    )
    # Each command's default is one of these, and another one.
    assert (megatron("") == found) == (flag == "none")
    assert (fsdp2() == found) == (flag == "true")


# --- preference optimisation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a reference near it, and pairs."""
    folder = tmp_path_factory.mktemp("both")
    for name in ("model", "other"):
        if name == "model":
            save_toy("qwen3", folder / name)
        else:
            save_near(folder / "model", folder / name)
        make_tokenizer().save_pretrained(folder / name)
    replies = [record["output"] for record in make_records(STEPS * PAIRS, seed=1)]
    records = [
        {"instruction": record["instruction"], "chosen": record["output"], "rejected": reply}
        for record, reply in zip(make_records(STEPS * PAIRS), replies, strict=True)
    ]
    write_records(folder / "pairs.jsonl", records)
    return folder


def steps_of(output: Path) -> list[dict[str, Any]]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "lm_loss" in line]


def megatron_steps(pool: RankPool, folder: Path, name: str, *, ranks: int = 1, flags: str = "") -> list[dict[str, Any]]:
    model, output = folder / "model", folder / name
    line = (
        f"--stage dpo --is-pairwise-dataset --model-from-hf {model} --load {model} --ref-model {folder / 'other'} "
        f"--data-path {folder / 'pairs.jsonl'} --data-cache-path {output}_cache --no-shuffle --split 100,0,0 "
        f"--tokenizer-name-or-path {model} --handler-name AlpacaStylePairwiseHandler --prompt-type qwen3 "
        f"--dpo-beta {BETA} --pref-ftx 0.5 --seq-length {LENGTH} --no-pad-to-seq-lengths --micro-batch-size 2 "
        f"--global-batch-size {PAIRS} --train-iters {STEPS} --lr {RECIPE['lr']} --lr-decay-style constant "
        f"--adam-beta1 {RECIPE['betas'][0]} --adam-beta2 {RECIPE['betas'][1]} --adam-eps {RECIPE['eps']} "
        f"--weight-decay {RECIPE['weight_decay']} --clip-grad {RECIPE['clip']} --hidden-dropout 0 "
        "--attention-dropout 0 --make-vocab-size-divisible-by 4 --use-flash-attn --num-workers 0 --eval-iters 0 "
        f"--log-interval 1 --metrics-dir {output} --enable-thinking true {flags}"
    )
    assert pool.run(ROW, ranks=ranks, argv=shlex.split(line)) == [0] * ranks
    return steps_of(output)


@pytest.fixture(scope="module")
def fsdp2_steps(rank_pool: RankPool, folder: Path) -> list[dict[str, Any]]:
    """The steps of the FSDP2 backend on two ranks."""
    training = {
        "stage": "dpo",
        "ref_model": str(folder / "other"),
        "dpo_beta": BETA,
        "pref_ftx": 0.5,
        "disable_shuffling": True,
        "max_steps": STEPS,
        **RECIPE_FIELDS,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": PAIRS // 2,
        "save_hf_weights": False,
    }
    data = {
        "dataset": {"file_name": str(folder / "pairs.jsonl"), "ranking": True},
        "template": "qwen3",
        "cutoff_len": LENGTH,
    }
    config = write_config(folder / "fsdp2", folder / "model", data, **training)
    rows = rank_pool.run(FSDP2, ranks=2, argv=[config])
    assert [(row["code"], row["error"]) for row in rows] == [(0, None)] * 2
    return steps_of(folder / "fsdp2")


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "flags"), [(1, ""), (2, "--tensor-model-parallel-size 2")])
def test_both_backends_report_the_same_steps(
    rank_pool: RankPool, folder: Path, fsdp2_steps: list[dict[str, Any]], ranks: int, flags: str
) -> None:
    found = megatron_steps(rank_pool, folder, f"megatron{ranks}", ranks=ranks, flags=flags)
    assert [line["iteration"] for line in found] == [line["iteration"] for line in fsdp2_steps] == [1, 2, 3]
    for mine, theirs in zip(found, fsdp2_steps, strict=True):
        assert relative(mine["lm_loss"], theirs["lm_loss"]) < 1e-5
        assert relative(mine["grad_norm"], theirs["grad_norm"]) < 1e-5
        assert [mine[name] for name in REWARDS] == [pytest.approx(theirs[name], rel=1e-5, abs=1e-5) for name in REWARDS]
        # The reference is another model.
        assert abs(mine["rewards_margin"]) > 1e-3


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "flags"), [("beta", f"--dpo-beta {BETA * 1.5}"), ("reference", "--ref-model {folder}/model")]
)
def test_another_beta_and_another_reference_are_noticed(
    rank_pool: RankPool, folder: Path, fsdp2_steps: list[dict[str, Any]], name: str, flags: str
) -> None:
    found = megatron_steps(rank_pool, folder, name, flags=f"{flags.format(folder=folder)} --exit-interval 1")
    assert relative(found[0]["lm_loss"], fsdp2_steps[0]["lm_loss"]) > 1e-4
    assert relative(found[0]["grad_norm"], fsdp2_steps[0]["grad_norm"]) > 1e-4
