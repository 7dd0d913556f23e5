"""Supervised fine-tuning equals transformers + AdamW on the same samples, whose masks transformers' template makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import RankPool
from tests.support.reference import RECIPE, Sample, Trace, assert_parity, train_reference
from tests.support.toys import save_toy
from tests.tasks.posttrain.conversations import (
    HANDLER,
    LENGTH,
    make_records,
    make_tokenizer,
    prepare,
    rendered,
    samples_in_rows,
    write_records,
)
from tests.training.assembled import hub_weights
from tests.training.test_parity import in_classes

pytestmark = pytest.mark.distributed
STEPS, GLOBAL_BATCH = 5, 8
ROW, CHANGE = "tests.tasks.posttrain.rows:train", "tests.tasks.posttrain.rows:logits_with_a_change"
OF_THREE = 3 * GLOBAL_BATCH
"""A packed row of three samples."""
TP, PP, EP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--expert-model-parallel-size"
VARIABLE = ["--no-pad-to-seq-lengths", "--pad-to-multiple-of", "4"]
NEAT = ["--pack", "--neat-pack", "--reset-attention-mask"]
ALLTOALL = ["--moe-token-dispatcher-type", "alltoall"]


class Place:
    """Toys, and records in three forms: as they are, one sample a row, and packed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tokenizer = folder / "tokenizer"
        make_tokenizer().save_pretrained(tokenizer)
        self.tokenizer = tokenizer
        records = make_records(STEPS * GLOBAL_BATCH, turns=2)
        self.raw = write_records(folder / "raw.jsonl", records)
        self.plain = prepare(self.raw, tokenizer, folder / "plain")
        self.samples = [[rendered(record)] for record in records]
        more = make_records(150, seed=1, turns=2)
        file = write_records(folder / "more.jsonl", more)
        self.packed = prepare(file, tokenizer, folder / "packed", "--pack", "--neat-pack")
        self.rows = samples_in_rows(self.packed, [rendered(record) for record in more])
        self._references: dict[tuple[str, str], Trace] = {}

    def model(self, toy: str) -> Path:
        folder = self.folder / toy
        return folder if folder.exists() else save_toy(toy, folder)

    def reference(self, toy: str, form: str) -> Trace:
        """Samples one by one, without padding."""
        if (toy, form) not in self._references:
            rows = self.rows if form == "packed" else self.samples
            steps = [rows[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH] for step in range(STEPS)]
            samples: list[list[Sample]] = [[sample for row in step for sample in row] for step in steps]
            self._references[toy, form] = train_reference(
                self.model(toy),
                [sample for step in samples for sample in step],
                steps=STEPS,
                global_batch=GLOBAL_BATCH,
                one_by_one=True,
                sizes=[len(step) for step in samples],
            )
        return self._references[toy, form]

    def argv(self, toy: str, form: str, flags: list[str]) -> list[str]:
        model, data = str(self.model(toy)), str(getattr(self, form))
        line = (
            f"--stage sft --is-instruction-dataset --model-from-hf {model} --load {model} --data-path {data} "
            f"--tokenizer-name-or-path {self.tokenizer} --split 100,0,0 --eval-iters 0 --no-shuffle "
            f"--seq-length {LENGTH} --micro-batch-size 2 --global-batch-size {GLOBAL_BATCH} --train-iters {STEPS} "
            f"--lr {RECIPE['lr']} --lr-decay-style constant --adam-beta1 {RECIPE['betas'][0]} "
            f"--adam-beta2 {RECIPE['betas'][1]} --adam-eps {RECIPE['eps']} --weight-decay {RECIPE['weight_decay']} "
            f"--clip-grad {RECIPE['clip']} --hidden-dropout 0 --attention-dropout 0 --moe-aux-loss-coeff 0 "
            "--make-vocab-size-divisible-by 4 --num-workers 0"
        )
        return [*line.split(), *flags, *(NEAT if form == "packed" else []), *(HANDLER if form == "raw" else [])]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("sft"))


def run(pool: RankPool, place: Place, toy: str, form: str, ranks: int, flags: list[str]) -> tuple[Trace, Any]:
    rows = pool.run(ROW, ranks=ranks, argv=place.argv(toy, form, flags), steps=STEPS)
    assert all(row["losses"] == rows[0]["losses"] for row in rows)
    folder = place.model(toy)
    weights = in_classes(folder, hub_weights(folder, rows))
    return Trace(losses=rows[0]["losses"], grad_norms=rows[0]["grad_norms"], weights=weights), rows


# (toy, form of the data, ranks, flags)
ROWS: list[tuple[str, str, int, list[str]]] = [
    ("qwen3", "plain", 2, [TP, "2", "--sequence-parallel", *VARIABLE]),
    ("llama_tied", "plain", 2, [PP, "2", *VARIABLE]),
    ("qwen3_moe", "plain", 4, [EP, "2", PP, "2", *ALLTOALL, *VARIABLE]),
    ("qwen3", "packed", 4, [TP, "2", PP, "2"]),
    ("qwen3_moe", "packed", 2, [EP, "2", *ALLTOALL]),
    ("qwen3", "packed", 1, ["--micro-batch-size", "8"]),
    ("qwen3", "raw", 2, ["--use-flash-attn", *VARIABLE]),
    ("qwen3", "packed", 2, ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]),
    ("qwen3", "packed", 2, [TP, "2", "--use-flash-attn"]),
    ("llama_tied", "packed", 2, [PP, "2"]),
    ("qwen3", "plain", 1, []),
    ("qwen3", "plain", 4, [PP, "4", *VARIABLE]),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("toy", "form", "ranks", "flags"), ROWS, ids=lambda value: value if type(value) is str else None
)
def test_equals_transformers(
    rank_pool: RankPool, place: Place, toy: str, form: str, ranks: int, flags: list[str]
) -> None:
    found, rows = run(rank_pool, place, toy, form, ranks, flags)
    assert_parity(found, place.reference(toy, form))
    lengths = {length for row in rows for length in row["lengths"]}
    assert (len(lengths) > 2) == ("--no-pad-to-seq-lengths" in flags), lengths
    assert max(lengths) <= LENGTH


@pytest.mark.parametrize(
    ("mutant", "form"),
    [("mask_shifted", "plain"), ("labels_not_shifted", "plain"), ("samples_see_each_other", "packed")],
)
def test_mutants_are_caught(rank_pool: RankPool, place: Place, mutant: str, form: str) -> None:
    [row] = rank_pool.run(ROW, ranks=1, argv=place.argv("qwen3", form, []), steps=1, mutant=mutant)
    expected = place.reference("qwen3", form)
    assert abs(row["losses"][0] / expected.losses[0] - 1) > 1e-4
    assert abs(row["grad_norms"][0] / expected.grad_norms[0] - 1) > 1e-4


@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, [TP, "2"]), (1, ["--use-flash-attn"])])
def test_samples_of_a_row_do_not_see_each_other(
    rank_pool: RankPool, place: Place, ranks: int, flags: list[str]
) -> None:
    """One sample of a row becomes another one: the logits of all others stay, bit for bit."""
    assert len(place.rows[OF_THREE]) >= 3, "a sample before the one that changes, and one behind it"
    for found in rank_pool.run(CHANGE, ranks=ranks, argv=place.argv("qwen3", "packed", flags), row=OF_THREE):
        others = found["documents"] != 1
        assert others.any() and not others.all()
        assert found["before"][others].equal(found["after"][others])
        assert not found["before"][~others].equal(found["after"][~others])


def test_samples_that_see_each_other_are_found(rank_pool: RankPool, place: Place) -> None:
    argv = place.argv("qwen3", "packed", [])
    [found] = rank_pool.run(CHANGE, ranks=1, argv=argv, row=OF_THREE, apart=False)
    behind = found["documents"] > 1
    assert not found["before"][behind].equal(found["after"][behind])
