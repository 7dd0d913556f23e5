"""The two training commands on the same files: `pretrain_gpt.py` and `train_fsdp2.py` see the same samples in the same
order, and report the same loss and gradient norm in each step.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_llm.tasks.preprocess.indexed_format import IndexedWriter
from tests.support.pool import RankPool
from tests.support.reference import RECIPE, relative
from tests.support.runs import RECIPE_FIELDS, metrics, save_model, write_config
from tests.support.toys import VOCABULARY

pytestmark = pytest.mark.distributed
MEGATRON, FSDP2 = "tests.training.command_rows:pretrain", "tests.distributed.runs:train"
RANKS, STEPS, GLOBAL_BATCH, LENGTH, SEED = 2, 8, 8, 40, 7
EOD, FIRST_FREE = 257, 259  # of the byte tokenizer

APART = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
# (toy, flags of the topology, whether the documents of a sample are kept apart)
ROWS = [
    ("llama", "--tensor-model-parallel-size 2", False),
    ("qwen3", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", True),
    ("qwen3_moe", "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall", False),
]


class Workplace:
    """Models, and a file of documents shorter than a sample, of which several and parts of some are in each sample."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.data = folder / "data"
        random = np.random.RandomState(0)
        with IndexedWriter(self.data) as writer:
            for _ in range(150):
                ids = random.randint(FIRST_FREE, VOCABULARY, size=random.randint(5, LENGTH))
                writer.add(np.append(ids, EOD))

    def model(self, toy: str) -> Path:
        """The toy's directory, with a tokenizer."""
        folder = self.folder / toy
        return folder if folder.exists() else save_model(folder, toy)

    def megatron(self, name: str, toy: str, flags: str, *, steps: int = STEPS, mutant: str | None = None) -> Path:
        """Train with the first `steps` steps of the recipe; the folder of the metrics."""
        model, output = self.model(toy), self.folder / name
        line = (
            f"--model-from-hf {model} --load {model} --data-path {self.data} --split 100,0,0 --seed {SEED} "
            f"--data-cache-path {output}_cache --seq-length {LENGTH} --micro-batch-size 2 "
            f"--global-batch-size {GLOBAL_BATCH} --train-iters {STEPS} --lr {RECIPE['lr']} --lr-decay-style constant "
            f"--adam-beta1 {RECIPE['betas'][0]} --adam-beta2 {RECIPE['betas'][1]} --adam-eps {RECIPE['eps']} "
            f"--weight-decay {RECIPE['weight_decay']} --clip-grad {RECIPE['clip']} --hidden-dropout 0 "
            "--attention-dropout 0 --moe-aux-loss-coeff 0 --make-vocab-size-divisible-by 4 "
            f"--use-flash-attn --eval-iters 0 --log-interval 1 --metrics-dir {output} --exit-interval {steps} {flags}"
        )
        assert self.pool.run(MEGATRON, ranks=RANKS, argv=shlex.split(line), mutant=mutant) == [0] * RANKS
        return output

    def fsdp2(self, name: str, toy: str, *, apart: bool, steps: int = STEPS) -> Path:
        """The same with the other backend."""
        output = self.folder / name
        data = {
            "dataset": {"file_name": str(self.data)},
            "data_manager_type": "mg",
            "cutoff_len": LENGTH,
            "append_eod": apart,
            "reset_attention_mask": apart,
        }
        training = {
            "stage": "pt",
            "seed": SEED,
            "max_steps": STEPS,
            **RECIPE_FIELDS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": GLOBAL_BATCH // RANKS // 2,
            "save_hf_weights": False,
        }
        config = write_config(output, self.model(toy), data, **training)
        rows = self.pool.run(FSDP2, ranks=RANKS, argv=[config])
        assert [(row["code"], row["error"]) for row in rows] == [(0, None)] * RANKS
        return output


@pytest.fixture(scope="module")
def place(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(rank_pool, tmp_path_factory.mktemp("backends"))


@pytest.fixture(scope="module")
def expected(place: Workplace) -> Any:
    """The steps of the FSDP2 backend by toy, trained once."""
    made: dict[str, list[dict[str, Any]]] = {}

    def steps(toy: str, apart: bool) -> list[dict[str, Any]]:
        if toy not in made:
            made[toy] = metrics(place.fsdp2(f"{toy}_fsdp2", toy, apart=apart))
        return made[toy]

    return steps


def differences(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Per step the relative differences of (loss, gradient norm)."""
    return [
        (relative(mine["lm_loss"], theirs["lm_loss"]), relative(mine["grad_norm"], theirs["grad_norm"]))
        for mine, theirs in zip(found, expected, strict=False)
    ]


@pytest.mark.parametrize(("toy", "flags", "apart"), ROWS, ids=[row[0] for row in ROWS])
def test_both_backends_report_the_same_steps(
    place: Workplace, expected: Any, toy: str, flags: str, apart: bool
) -> None:
    found = metrics(place.megatron(f"{toy}_megatron", toy, f"{flags} {APART if apart else ''}"))
    others = expected(toy, apart)
    assert [step["iteration"] for step in found] == [step["iteration"] for step in others] == [*range(1, STEPS + 1)]
    for name in ("consumed_samples", "consumed_tokens", "learning_rate"):
        assert [step[name] for step in found] == [step[name] for step in others], name
    losses = [step["lm_loss"] for step in others]
    assert len({round(loss, 3) for loss in losses}) == STEPS, losses
    for step, pair in enumerate(differences(found, others), start=1):
        assert max(pair) < 1e-5, f"step {step}: relative difference of loss and gradient norm {pair}"


@pytest.mark.parametrize("mutant", ["labels_not_shifted", "ends_of_documents_count", "next_global_batch"])
def test_mutants_are_caught(place: Workplace, expected: Any, mutant: str) -> None:
    toy, flags, apart = ROWS[1]
    found = metrics(place.megatron(mutant, toy, f"{flags} {APART}", steps=1, mutant=mutant))
    assert min(differences(found, expected(toy, apart))[0]) > 1e-4
