"""Answers at evaluations equal transformers' greedy generation, leave training alone, and are written once."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.core.lora.reference import ALPHA, RANK, make_adapter
from tests.support.pool import RankPool, RowFailed
from tests.support.toys import save_toy
from tests.tasks.posttrain.conversations import HANDLER, make_records, make_tokenizer, rendered, write_records
from tests.tasks.posttrain.pairs import make_pairs, write_pairs
from tests.tasks.posttrain.sample_rows import Answers

pytestmark = pytest.mark.distributed
ANSWERS, TRAIN = "tests.tasks.posttrain.sample_rows:answers", "tests.tasks.posttrain.sample_rows:train"
RUN = "tests.tasks.posttrain.rows:finetune"
COUNT, HELD_OUT, LENGTH, NEW = 12, 5, 128, 6
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
EP = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"


def greedy(folder: Path, prompts: list[list[int]], stops: list[int]) -> Answers:
    """By transformers, each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: Answers = []
    for prompt in prompts:
        made = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=min(NEW, LENGTH - len(prompt)),
            do_sample=False,
            eos_token_id=stops,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        is_stopped = made[-1] in stops
        found.append((prompt, made[:-1] if is_stopped else made, "stop" if is_stopped else "length"))
    return found


class Place:
    """Toys that stop at a token which they do say, and records of which the last ones are held out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = make_records(COUNT, turns=2)
        write_records(folder / "raw.jsonl", self.records)
        self.tokenizer = make_tokenizer()
        self._expected: dict[str, Answers] = {}

    @property
    def prompts(self) -> list[list[int]]:
        """Of the held-out records: all before the first reply."""
        samples = [rendered(record) for record in self.records[-HELD_OUT:]]
        return [ids[: next(n for n, label in enumerate(labels) if label != -100)] for ids, labels in samples]

    def model(self, toy: str) -> Path:
        folder = self.folder / toy
        if not folder.exists():
            save_toy(toy, folder)
            self.tokenizer.save_pretrained(folder)
            # Where the answers to the first prompt end.
            said = greedy(folder, self.prompts[:1], [self.tokenizer.eos_token_id])[0][1]
            GenerationConfig(eos_token_id=[self.tokenizer.eos_token_id, said[3]]).save_pretrained(folder)
        return folder

    def expected(self, toy: str) -> Answers:
        if toy not in self._expected:
            folder = self.model(toy)
            self._expected[toy] = greedy(folder, self.prompts, self.stops(toy))
        return self._expected[toy]

    def stops(self, toy: str) -> list[int]:
        """What generation is told of, and what the template ends replies with."""
        named = json.loads((self.model(toy) / "generation_config.json").read_text())["eos_token_id"]
        return [*named, self.tokenizer.convert_tokens_to_ids("<|im_end|>")]

    def argv(self, toy: str | None, flags: str, *, data: str | None = None, asked: int = HELD_OUT) -> list[str]:
        """`toy` None: `flags` say what the model is."""
        model = self.model(toy or "qwen3")
        line = (
            f"--stage sft {f'--model-from-hf {model} --load {model}' if toy else ''} "
            f"--data-path {data or self.folder / 'raw.jsonl'} --tokenizer-name-or-path {model} "
            f"--split 7,5,0 --no-shuffle --seq-length {LENGTH} --micro-batch-size 2 --eval-samples {asked} "
            "--global-batch-size 4 --train-iters 4 --eval-interval 2 --eval-iters 1 --lr 1e-3 --lr-decay-style "
            "constant --make-vocab-size-divisible-by 4 --use-flash-attn --log-interval 1 --num-workers 0 "
            f"--hidden-dropout 0 --attention-dropout 0 --metrics-dir {self.folder / 'unused'} "
            f"--eval-samples-max-new-tokens {NEW} {flags}"
        )
        return [*shlex.split(line), *HANDLER]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("answers"))


@pytest.mark.parametrize(
    ("toy", "ranks", "flags"),
    [
        ("qwen3", 1, ""),
        ("qwen3", 2, f"{TP} --sequence-parallel --no-pad-to-seq-lengths"),
        ("qwen3", 2, f"{PP} --pack --neat-pack --reset-attention-mask --split 1,1,0"),
        ("qwen3", 2, f"{PP} --num-layers-per-virtual-pipeline-stage 1"),
        ("qwen3_moe", 2, EP),
        ("qwen3", 4, f"{TP} {PP} {OVERLAPPED}"),
    ],
)
def test_answers_equal_transformers(rank_pool: RankPool, place: Place, toy: str, ranks: int, flags: str) -> None:
    rows = rank_pool.run(ANSWERS, ranks=ranks, argv=place.argv(toy, flags))
    expected = place.expected(toy)
    assert {reason for _, _, reason in expected} == {"stop", "length"}
    if "--pack" in flags:
        # Of each packed row the first document; which record it is, its prompt says.
        prompts = [prompt for prompt, _, _ in rows[0]]
        samples = [rendered(record)[0] for record in place.records]
        assert prompts and all(any(ids[: len(prompt)] == prompt for ids in samples) for prompt in prompts)
        expected = greedy(place.model(toy), prompts, place.stops(toy))
    assert rows == [expected] * ranks


@pytest.mark.parametrize(
    ("mutant", "ranks", "flags"), [("own_part_of_the_vocabulary", 2, TP), ("behind_the_padding", 1, "")]
)
def test_faults_give_other_answers(rank_pool: RankPool, place: Place, mutant: str, ranks: int, flags: str) -> None:
    rows = rank_pool.run(ANSWERS, ranks=ranks, argv=place.argv("qwen3", flags), mutant=mutant)
    assert rows[0] != place.expected("qwen3")


def test_adapters_answer_as_in_peft(rank_pool: RankPool, place: Place) -> None:
    model, targets = place.model("qwen3"), ["linear_q", "linear_fc1_up"]
    adapter = make_adapter(model, place.folder / "adapter", targets)
    merged = place.folder / "merged"
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter).merge_and_unload().save_pretrained(
        merged
    )
    words = f"{TP} --lora-target-modules {' '.join(targets)} --lora-r {RANK} --lora-alpha {ALPHA} --lora-load {adapter}"
    rows = rank_pool.run(ANSWERS, ranks=2, argv=place.argv("qwen3", words))
    expected = greedy(merged, place.prompts, place.stops("qwen3"))
    assert expected != place.expected("qwen3")
    assert rows == [expected] * 2


def test_pairs_are_asked_their_prompt(rank_pool: RankPool, place: Place) -> None:
    pairs = make_pairs(8)
    data = write_pairs(place.folder / "pairs", pairs)
    flags = "--stage dpo --is-pairwise-dataset --split 1,1,0"
    [row] = rank_pool.run(ANSWERS, ranks=1, argv=place.argv("qwen3", flags, data=str(data), asked=2))
    prompts = [ids[: next(n for n, label in enumerate(labels) if label != -100)] for (ids, labels), _ in pairs[4:6]]
    assert [prompt for prompt, _, _ in row] == prompts
    assert row == greedy(place.model("qwen3"), prompts, place.stops("qwen3"))


DROPOUT = "--attention-dropout 0.2 --hidden-dropout 0.2"
COUNTING = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --vocab-size 509 --normalization "
    "RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--max-position-embeddings 128 --num-experts 4 --moe-router-topk 2 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-aux-loss-coeff 0.01 --init-method-std 0.2"
)
"""A model whose routers count tokens and move by what they counted."""


@pytest.mark.parametrize(
    ("toy", "ranks", "flags"),
    [(None, 2, f"{COUNTING} {EP}"), ("qwen3", 4, f"{TP} --sequence-parallel {OVERLAPPED}")],
)
def test_training_is_left_alone(rank_pool: RankPool, place: Place, toy: str | None, ranks: int, flags: str) -> None:
    argv = place.argv(toy, f"{flags} {DROPOUT}", asked=2)
    without = rank_pool.run(TRAIN, ranks=ranks, argv=argv, steps=3, asks=False)
    asked = rank_pool.run(TRAIN, ranks=ranks, argv=argv, steps=3, asks=True)
    assert [row["rows"] for row in asked] == [6] * ranks
    assert _differences(without, asked) == []
    changed = rank_pool.run(TRAIN, ranks=ranks, argv=argv, steps=3, asks=True, mutant="in_training_mode")
    assert _differences(without, changed) != []
    if toy is None:
        assert any(name.endswith("expert_bias") and value.any() for name, value in without[0]["states"][0].items())
        assert all(noted["load_balancing_loss"] for row in without for _, _, noted in row["numbers"])


def _differences(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> list[str]:
    """What is not equal bit for bit."""
    found = []
    for mine, theirs in zip(first, second, strict=True):
        found += [name for name in ("numbers", "modes") if mine[name] != theirs[name]]
        for own, other in zip(mine["states"], theirs["states"], strict=True):
            found += [name for name in own if not torch.equal(own[name], other[name])]
    return found


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_run_writes_each_evaluation_once(rank_pool: RankPool, place: Place) -> None:
    """Also where it is interrupted, resumed, and resumed when nothing is left to train."""

    def run(name: str, flags: str) -> list[dict[str, Any]]:
        argv = place.argv("qwen3", f"{flags} --metrics-dir {place.folder / name}", asked=100)
        assert rank_pool.run(RUN, ranks=2, argv=argv) == [0, 0]
        return rows_of(place.folder / name)

    whole = run("whole", TP)
    assert [(row["step"], row["index"]) for row in whole] == [(step, n) for step in (2, 4) for n in range(HELD_OUT)]
    assert list(whole[0]) == ["step", "index", "prompt", "answer", "reference", "finish_reason"]
    texts = [(row["prompt"], row["reference"] + "<|im_end|>") for row in whole[:HELD_OUT]]
    for (prompt, reference), record in zip(texts, place.records[-HELD_OUT:], strict=True):
        ids, _ = rendered(record)
        assert place.tokenizer.decode(ids).startswith(prompt + reference) and prompt.endswith("assistant\n")
    save = f"--save {place.folder / 'ckpt'} --ckpt-format torch_dist"
    first = run("parts", f"{TP} {save} --exit-interval 2")
    assert {row["step"] for row in first} == {2}
    go_on = f"{TP} {save} --load {place.folder / 'ckpt'}"
    assert run("parts", go_on) == whole
    assert run("parts", go_on) == whole


def test_there_must_be_prompts(rank_pool: RankPool, place: Place) -> None:
    """A test set alone is something to evaluate on, but not at every evaluation."""
    argv = place.argv("qwen3", "--split 7,0,5")
    with pytest.raises(RowFailed, match="--eval-samples 5 asks prompts of the validation data, but there are no"):
        rank_pool.run(RUN, ranks=1, argv=argv)
