"""Answers at evaluations equal transformers' greedy generation, leave training alone, and are written once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config import DataConfig, ModelConfig, ParallelConfig, TrainingConfig, check_config
from mindspeed_llm.fsdp2.config.config import Config
from mindspeed_llm.fsdp2.data.mg_samples import NextTokenSamples
from mindspeed_llm.fsdp2.data.pairs import Pair
from mindspeed_llm.fsdp2.data.sample import Collator, Sample
from mindspeed_llm.fsdp2.data.sources import EvalSource
from mindspeed_llm.fsdp2.train.eval_samples import ModelNextTokens
from mindspeed_llm.tasks.inference.greedy import NO_TOKEN
from mindspeed_llm.tasks.inference.prompts import first_prompts
from tests.support.pool import RankPool
from tests.support.runs import copy_run, exported, metrics, save_model, sft_data, write_config, write_conversations

pytestmark = pytest.mark.distributed
ANSWERS, TRAIN = "tests.fsdp2.train.sample_rows:answers", "tests.fsdp2.train.sample_rows:train"
HELD_OUT, NEW, STEPS = 3, 6, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    save_model(folder / "model", "llama", dropout=0.2)
    write_conversations(folder / "train.jsonl", 8)
    write_conversations(folder / "eval.jsonl", HELD_OUT, seed=1)
    return folder


def configured(folder: Path, name: str, **training: Any) -> str:
    """The file of a run with output in `folder / name`."""
    evaluated = {"file_name": str(folder / "eval.jsonl"), "formatting": "alpaca"}
    data = sft_data(folder / "train.jsonl", eval_dataset=evaluated)
    wanted = {"max_steps": STEPS, "eval_steps": 2, "eval_on_start": True, "eval_samples_max_new_tokens": NEW}
    return write_config(folder / name, folder / "model", data, **wanted, **training)


def records(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


def greedy(folder: Path, prompts: list[list[int]], stops: list[int]) -> list[tuple[list[int], list[int], str]]:
    """By transformers, each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        asked, mask = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.int64)
        made = model.generate(
            asked, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=stops, pad_token_id=0
        )[0, len(prompt) :].tolist()
        is_stopped = made[-1] in stops
        found.append((prompt, made[:-1] if is_stopped else made, "stop" if is_stopped else "length"))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_equal_transformers(rank_pool: RankPool, folder: Path, ranks: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    prompts = [tokenizer(record["instruction"])["input_ids"] for record in records(folder)]
    file = folder / "model" / "generation_config.json"
    named = json.loads(file.read_text())
    # One of the answers ends where the first is half way.
    said = greedy(folder, prompts, [tokenizer.eos_token_id])[0][1]
    file.write_text(json.dumps(named | {"eos_token_id": [2, said[3]]}))
    try:
        argv = [configured(folder, f"asked_{ranks}", eval_samples=100, per_device_eval_batch_size=2)]
        rows = rank_pool.run(ANSWERS, ranks=ranks, argv=argv)
    finally:
        file.write_text(json.dumps(named))
    expected = greedy(folder, prompts, [tokenizer.eos_token_id, 2, said[3]])
    assert "stop" in {reason for _, _, reason in expected} and len(expected) == HELD_OUT
    assert rows == [expected] * ranks


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_training_is_left_alone_and_each_evaluation_written_once(rank_pool: RankPool, folder: Path) -> None:
    def run(name: str, mutant: str | None = None, **training: Any) -> Path:
        argv = [configured(folder, name, save_steps=2, **training)]
        rows = rank_pool.run(TRAIN, ranks=2, argv=argv, mutant=mutant)
        assert [(row["code"], row["error"]) for row in rows] == [(0, None)] * 2
        return folder / name

    without, asked = run("without"), run("asked", eval_samples=2)
    assert metrics(asked) == metrics(without)
    assert _same(exported(asked), exported(without))
    assert not (without / "samples.jsonl").exists()
    for mutant in ("in_training_mode", "stays_in_evaluation_mode"):
        assert metrics(run(mutant, mutant, eval_samples=2, save_hf_weights=False)) != metrics(without)

    rows = rows_of(asked)
    assert [(row["step"], row["index"]) for row in rows] == [(step, n) for step in (0, 2, STEPS) for n in range(2)]
    texts = [(record["instruction"], record["output"]) for record in records(folder)[:2]]
    assert [(row["prompt"], row["reference"]) for row in rows[:2]] == texts
    copy_run(asked, folder / "resumed", 2)
    resumed = run("resumed", eval_samples=2, resume_from_checkpoint="latest")
    assert rows_of(resumed) == rows


def _same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_rows_of_texts_are_asked_their_first_half() -> None:
    rows = [np.array([5, 6, 7, 8, 2, 9]), np.array([1, 3, 4, 4, 4, 4])]

    source = EvalSource(
        NextTokenSamples(rows, eod_id=2), Collator(pad_token_id=0), rank=0, num_ranks=1, micro_batch_size=1
    )
    found = first_prompts(source.texts(), 5, max_length=8, stop_ids={2})
    assert [(item.ids, item.reference) for item in found] == [([5, 6], [7, 8]), ([1, 3, 4], [4, 4, 4])]


def test_pairs_are_asked_their_prompt() -> None:
    chosen, rejected = (Sample(np.array([5, 6, *end]), np.array([-100, *end, -100])) for end in ([7, 8], [9, 9]))
    ids, labels = Pair(chosen, rejected).text()
    assert (ids.tolist(), labels.tolist()) == ([5, 6, 7, 8], [-100, -100, 7, 8])


def test_there_must_be_evaluation_data(folder: Path) -> None:
    config = Config(
        model=ModelConfig(model_name_or_path=str(folder / "model")),
        data=DataConfig(dataset={"file_name": str(folder / "train.jsonl")}, template="empty"),
        parallel=ParallelConfig(),
        training=TrainingConfig(output_dir=str(folder / "out"), eval_samples=2),
    )
    with pytest.raises(UserError, match=r"training\.eval_samples = 2 asks prompts of the evaluation data"):
        check_config(config, world_size=1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_have_no_next_token(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training may go on with them; the other rows have theirs."""
    logits = torch.tensor([[0.0, value, 2.0], [0.0, 1.0, 2.0]])
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: None)
    next_tokens = ModelNextTokens(
        lambda **_: SimpleNamespace(logits=logits[:, None]),  # type: ignore[arg-type]
        torch.device("cpu"),
        micro_batch_size=2,
    )
    assert next_tokens([[1], [1]]) == [NO_TOKEN, 2]
