"""Preference optimisation equals a few lines of torch over transformers, for each loss and topology."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.core.lora.assembled import hub_adapter
from tests.core.lora.reference import ALPHA, RANK, make_adapter
from tests.core.lora.reference import RECIPE as LORA_RECIPE
from tests.support.pool import RankPool
from tests.support.reference import RECIPE, Trace, assert_parity, relative
from tests.support.toys import save_toy
from tests.tasks.posttrain.pairs import BETA, REWARDS, make_pairs, save_near, train_reference, write_pairs
from tests.training.assembled import hub_weights
from tests.training.test_parity import in_classes

pytestmark = pytest.mark.distributed
STEPS, PAIRS, LENGTH = 3, 4, 32
ROW, REFERENCE = "tests.tasks.posttrain.pair_rows:train", "tests.tasks.posttrain.pair_rows:reference_weights"
TP, PP = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
EP = ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "0"]
VARIABLE = ["--no-pad-to-seq-lengths", "--pad-to-multiple-of", "4"]
TARGETS = ["linear_q", "linear_fc1_up"]


class Place:
    """Toys, another model for a reference, an adapter, and pairs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pairs = make_pairs(STEPS * PAIRS)
        self.data = write_pairs(folder / "pairs", self.pairs)
        self._references: dict[Any, tuple[Trace, list[dict[str, float]]]] = {}

    def model(self, toy: str) -> Path:
        folder = self.folder / toy
        return folder if folder.exists() else save_toy(toy, folder)

    def other(self, toy: str) -> Path:
        """A model near the toy: far from it, all losses but one would be 0 or straight lines."""
        folder = self.folder / f"{toy}_other"
        return folder if folder.exists() else save_near(self.model(toy), folder)

    def adapter(self, toy: str) -> Path:
        folder = self.folder / f"{toy}_adapter"
        return folder if folder.exists() else make_adapter(self.model(toy), folder, TARGETS)

    def reference(
        self, toy: str, kind: str, *, smoothing: float = 0.0, ftx: float = 0.0, other: bool = False, lora: bool = False
    ) -> tuple[Trace, list[dict[str, float]]]:
        key = (toy, kind, smoothing, ftx, other, lora)
        if key not in self._references:
            self._references[key] = train_reference(
                self.model(toy),
                self.pairs,
                steps=STEPS,
                kind=kind,
                smoothing=smoothing,
                ftx=ftx,
                ref_model=self.other(toy) if other else self.model(toy),
                adapter=self.adapter(toy) if lora else None,
            )
        return self._references[key]

    def argv(
        self,
        toy: str,
        kind: str,
        flags: list[str],
        *,
        smoothing: float = 0.0,
        ftx: float = 0.0,
        other: bool = False,
        lora: bool = False,
        data: Path | None = None,
    ) -> list[str]:
        model = self.model(toy)
        line = (
            f"--stage dpo --is-pairwise-dataset --model-from-hf {model} --load {model} --data-path {data or self.data} "
            f"--split 100,0,0 --eval-iters 0 --no-shuffle --dpo-loss-type {kind} --dpo-beta {BETA} --pref-ftx {ftx} "
            f"--seq-length {LENGTH} --micro-batch-size 2 --global-batch-size {PAIRS} --train-iters {STEPS} "
            f"--lr {RECIPE['lr']} --lr-decay-style constant --adam-beta1 {RECIPE['betas'][0]} "
            f"--adam-beta2 {RECIPE['betas'][1]} --weight-decay {RECIPE['weight_decay']} "
            f"--adam-eps {(LORA_RECIPE if lora else RECIPE)['eps']} --clip-grad {RECIPE['clip']} --hidden-dropout 0 "
            "--attention-dropout 0 --make-vocab-size-divisible-by 4 --num-workers 0"
        )
        words = line.split()
        if smoothing:
            words += ["--dpo-label-smoothing", str(smoothing)]
        if other:
            words += ["--ref-model", str(self.other(toy))]
        if lora:
            words += ["--lora-target-modules", *TARGETS, "--lora-r", str(RANK), "--lora-alpha", str(ALPHA)]
            words += ["--lora-load", str(self.adapter(toy))]
        return [*words, *flags]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("dpo"))


# (toy, loss, ranks, flags, what else differs)
ROWS: list[tuple[str, str, int, list[str], dict[str, Any]]] = [
    ("qwen3", "sigmoid", 1, [], {}),
    ("qwen3", "sigmoid", 2, [*TP, "--sequence-parallel", *VARIABLE], {"smoothing": 0.1, "ftx": 0.5}),
    ("llama_tied", "sigmoid", 2, [*PP, "--micro-batch-size", "1", *VARIABLE], {"other": True}),
    ("qwen3", "hinge", 1, ["--micro-batch-size", "1"], {"other": True}),
    ("qwen3", "hinge", 2, TP, {"other": True}),
    ("llama_tied", "hinge", 2, PP, {"ftx": 1.0}),
    ("qwen3", "ipo", 1, [], {"other": True}),
    ("qwen3", "ipo", 2, TP, {"ftx": 0.5}),
    ("llama_tied", "ipo", 2, [*PP, "--num-layers-per-virtual-pipeline-stage", "1"], {"other": True}),
    ("qwen3", "sigmoid", 2, [*TP, *VARIABLE], {"lora": True}),
    ("qwen3", "sigmoid", 4, [*TP, *PP], {"lora": True}),
    ("qwen3", "sigmoid", 2, ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"], {}),
    ("qwen3", "hinge", 1, [], {"lora": True, "other": True}),
    ("qwen3_moe", "sigmoid", 2, [*EP, *VARIABLE], {"other": True}),
]


def run(pool: RankPool, place: Place, toy: str, kind: str, ranks: int, flags: list[str], **more: Any) -> Any:
    mutant = more.pop("mutant", None)
    argv = place.argv(toy, kind, flags, **more)
    rows = pool.run(ROW, ranks=ranks, argv=argv, steps=STEPS, mutant=mutant)
    assert all(row["losses"] == rows[0]["losses"] and row["metrics"] == rows[0]["metrics"] for row in rows)
    return rows


@pytest.mark.parametrize(
    ("toy", "kind", "ranks", "flags", "more"),
    [*ROWS[:3], *(pytest.param(*row, marks=pytest.mark.sampled(2)) for row in ROWS[3:])],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_steps_equal_a_few_lines_of_torch(
    rank_pool: RankPool, place: Place, toy: str, kind: str, ranks: int, flags: list[str], more: dict[str, Any]
) -> None:
    rows = run(rank_pool, place, toy, kind, ranks, flags, **more)
    expected, rewards = place.reference(toy, kind, **more)
    folder = place.model(toy)
    weights = hub_adapter(folder, rows) if more.get("lora") else in_classes(folder, hub_weights(folder, rows))
    found = Trace(losses=rows[0]["losses"], grad_norms=rows[0]["grad_norms"], weights=weights)
    assert_parity(found, expected)
    assert rows[0]["counts"] == [PAIRS] * STEPS
    for mine, theirs in zip(rows[0]["metrics"], rewards, strict=True):
        assert mine == {name: pytest.approx(theirs[name], rel=1e-4, abs=2e-5) for name in REWARDS}
    assert rows[0]["is_copy"] == (not more.get("lora") or bool(more.get("other")))
    # Of the pairs of the last step, behind it.
    assert rows[0]["evaluated"]["rewards_margin"] > rewards[-1]["rewards_margin"]
    if not more.get("other") and not more.get("lora"):
        # Policy and reference are one model: ties, which are no wins.
        first = rows[0]["metrics"][0]
        assert first["rewards_margin"] == first["rewards_accuracy"] == 0.0


@pytest.mark.parametrize(
    ("mutant", "more"),
    [
        ("adapters_stay_on", {"lora": True}),
        ("sides_swapped", {"other": True}),
        ("first_of_shards_do_not_count", {"other": True}),
        ("means_per_token", {"other": True}),
        ("reference_moves", {}),
    ],
)
def test_faults_are_found(rank_pool: RankPool, place: Place, mutant: str, more: dict[str, Any]) -> None:
    [row] = run(rank_pool, place, "qwen3", "sigmoid", 1, [], mutant=mutant, **more)
    expected, _ = place.reference("qwen3", "sigmoid", **more)
    found = zip([*row["losses"], *row["grad_norms"]], [*expected.losses, *expected.grad_norms], strict=True)
    assert max(relative(mine, theirs) for mine, theirs in found) > 1e-3


@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, PP)])
def test_equal_replies_are_ties(rank_pool: RankPool, place: Place, ranks: int, flags: list[str]) -> None:
    """Also against another reference: what both replies gain is alike."""
    data = write_pairs(place.folder / "equal", [(chosen, chosen) for chosen, _ in place.pairs])
    rows = run(rank_pool, place, "llama_tied", "sigmoid", ranks, flags, data=data, other=True)
    for loss, norm, metrics in zip(rows[0]["losses"], rows[0]["grad_norms"], rows[0]["metrics"], strict=True):
        assert loss == pytest.approx(math.log(2), rel=1e-6) and norm < 1e-4
        assert metrics["rewards_margin"] == metrics["rewards_accuracy"] == 0.0
        assert metrics["rewards_chosen"] == metrics["rewards_rejected"] != 0.0


@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, EP[:-2])])
def test_losses_of_routers_weigh_by_pairs(rank_pool: RankPool, place: Place, ranks: int, flags: list[str]) -> None:
    """What gradients are divided by is the number of pairs; see tests/training/test_router_losses.py for the rest."""
    argv = place.argv("qwen3_moe", "sigmoid", [*flags, "--moe-aux-loss-coeff", "0.5"])
    rows = rank_pool.run(ROW, ranks=ranks, argv=argv, steps=1)
    # Two rows of full length for each pair.
    assert [row["router_loss_scale"] for row in rows] == [pytest.approx(1 / (2 * LENGTH))] * ranks


def test_pairs_without_a_target_on_a_side_count_nothing(rank_pool: RankPool, place: Place) -> None:
    """They are in micro batches of their own, and among others."""
    pairs = []
    for number, (chosen, rejected) in enumerate(place.pairs):
        ids, labels = chosen
        pairs.append((chosen if number % 4 in (0, 3) else (ids, [-100] * len(labels)), rejected))
    data = write_pairs(place.folder / "partly", pairs)
    kept = [pair for number, pair in enumerate(place.pairs) if number % 4 in (0, 3)]
    words = {"kind": "sigmoid", "smoothing": 0.0, "ftx": 0.5, "adapter": None}
    model, other = place.model("qwen3"), place.other("qwen3")
    expected, rewards = train_reference(model, kept, steps=STEPS, ref_model=other, **words)
    argv = {"data": data, "ftx": 0.5, "other": True}
    rows = run(rank_pool, place, "qwen3", "sigmoid", 2, ["--micro-batch-size", "1"], **argv)
    assert rows[0]["counts"] == [2] * STEPS
    for step in range(STEPS):
        assert relative(rows[0]["losses"][step], expected.losses[step]) < 1e-5
        assert relative(rows[0]["grad_norms"][step], expected.grad_norms[step]) < 1e-5
        assert rows[0]["metrics"][step] == {
            name: pytest.approx(rewards[step][name], rel=1e-4, abs=2e-5) for name in REWARDS
        }


@pytest.mark.parametrize(("form", "flags"), [("torch_dist", PP), ("torch", TP)])
def test_a_checkpoint_is_the_reference(
    rank_pool: RankPool, place: Place, tmp_path: Path, form: str, flags: list[str]
) -> None:
    folder = str(tmp_path / "saved")
    words = ["--ref-model", folder, "--refer-model-iter", "3"]
    argv = place.argv("qwen3", "sigmoid", [*flags, *words])
    made = {"saved": [folder, form], "step": 3, "iteration": 5}
    for row in rank_pool.run(REFERENCE, ranks=2, argv=argv, **made):
        assert row == {"error": None, "equal": [True], "grad": False}
    wrong = argv[:-1] + ["4"]
    [row, _] = rank_pool.run(REFERENCE, ranks=2, argv=wrong, **made)
    assert row["error"].startswith(f"--refer-model-iter 4: {folder} has no iter_0000004; there are: 3")


def test_a_run_that_goes_on_says_which_reference_it_began_with(rank_pool: RankPool, place: Place) -> None:
    argv = place.argv("qwen3", "sigmoid", [])
    [row] = rank_pool.run(REFERENCE, ranks=1, argv=argv, saved=[], step=None, iteration=2)
    assert "goes on at step 2" in row["error"] and "name that one with --ref-model" in row["error"]


# --- whole runs


def whole_run(pool: RankPool, argv: list[str], folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    argv = [*argv, "--log-interval", "1", "--metrics-dir", str(folder)]
    code = pool.run("tests.tasks.posttrain.rows:finetune", ranks=1, argv=argv)
    assert code == [0]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_reports_rewards_and_goes_on_as_if_it_had_not_ended(
    rank_pool: RankPool, place: Place, tmp_path: Path, lora: bool
) -> None:
    """With adapters the reference of both parts is the model without them."""
    flags = ["--split", "67,33,0", "--eval-interval", "2", "--eval-iters", "1", "--lr", "1e-4"]
    if lora:
        flags += ["--lora-target-modules", *TARGETS, "--lora-r", "4"]
    argv = place.argv("qwen3", "sigmoid", flags)
    whole = whole_run(rank_pool, argv, tmp_path / "whole")
    argv += ["--save", str(tmp_path / "ckpt"), "--ckpt-format", "torch_dist"]
    whole_run(rank_pool, [*argv, "--exit-interval", "2"], tmp_path / "parts")
    words = ["--load", str(tmp_path / "ckpt")] + ([] if lora else ["--ref-model", str(place.model("qwen3"))])
    parts = whole_run(rank_pool, [*argv, *words], tmp_path / "parts")
    trained = [[line for line in lines if "lm_loss" in line] for lines in (whole, parts)]
    assert [line["iteration"] for line in trained[0]] == [1, 2, 3]
    keys = ("lm_loss", "grad_norm", *REWARDS)
    assert [[line[key] for key in keys] for line in trained[0]] == [[line[key] for key in keys] for line in trained[1]]
    first = trained[0][0]
    assert first["lm_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert [first[name] for name in REWARDS] == [0.0] * 4
    assert first["consumed_tokens"] == PAIRS * 2 * LENGTH
    assert all(line["rewards_chosen"] != 0.0 for line in trained[0][1:])
    held_out = [line for line in whole if "eval_loss" in line]
    # The last third of the pairs, of which there are as many as in a global batch.
    targets = [label for pair in place.pairs[-PAIRS:] for _, labels in pair for label in labels if label != -100]
    assert [line["eval_tokens"] for line in held_out] == [len(targets)] * 2
    assert all({f"eval_{name}" for name in REWARDS} <= line.keys() for line in held_out)
    assert not any("eval_perplexity" in line for line in held_out)
