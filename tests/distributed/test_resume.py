"""An interrupted and resumed run is the run without interruption: bit for bit on the same ranks, nearly on others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pool import RankPool
from tests.support.reference import relative
from tests.support.runs import (
    copy_run,
    eval_losses,
    exported,
    metrics,
    save_model,
    sft_data,
    text_data,
    write_config,
    write_conversations,
    write_texts,
)

pytestmark = pytest.mark.distributed
ROW = "tests.distributed.runs:train"
STEPS, HALF = 12, 6


class Workplace:
    """Model and data of one case on disk, and runs of it."""

    def __init__(
        self,
        pool: RankPool,
        folder: Path,
        *,
        toy: str = "llama",
        dropout: float = 0.0,
        data: str = "sft",
        **fields: Any,
    ) -> None:
        self.pool, self.folder = pool, folder
        self.model = save_model(folder / "model", toy, dropout=dropout)
        if data == "sft":
            self.data, self.stage = sft_data(write_conversations(folder / "data.jsonl", 90), **fields), "sft"
        else:
            file = write_texts(folder / "data.jsonl", 60)
            self.data, self.stage = text_data(file, manager=data, **fields), "pt"

    def run(
        self,
        name: str,
        ranks: int,
        *,
        fsdp_size: int | None = None,
        stop_at: dict[int, int] | None = None,
        patches: tuple[str, ...] = (),
        parallel: dict[str, Any] | None = None,
        **training: Any,
    ) -> list[dict[str, Any]]:
        """Train with output in `name`; returns what the row returns, per rank."""
        config = write_config(
            self.folder / name,
            self.model,
            self.data,
            parallel={**({"fsdp_size": fsdp_size} if fsdp_size else {}), **(parallel or {})},
            **{"stage": self.stage, "max_steps": STEPS, **training},
        )
        return self.pool.run(ROW, ranks=ranks, argv=[config], stop_at=stop_at, patches=patches)

    def same(self, one: str, other: str) -> None:
        """All steps and all weights of two runs are the same, bit for bit."""
        found, expected = metrics(self.folder / one), metrics(self.folder / other)
        assert [record["iteration"] for record in expected] == list(range(1, STEPS + 1))
        assert found == expected
        weights, others = exported(self.folder / one), exported(self.folder / other)
        assert weights.keys() == others.keys() and weights
        for name, tensor in weights.items():
            assert torch.equal(tensor, others[name]), name


def ends(rows: list[dict[str, Any]]) -> list[tuple[int | None, str | None]]:
    """How each rank ended: exit code and error."""
    return [(row["code"], row["error"]) for row in rows]


# toy, data, ranks, fsdp_size, accumulation, dropout, save_async, options of the data
SAME_RANKS = [
    ("llama", "sft", 2, None, 2, 0.2, True, {"neat_packing": True}),
    ("qwen3_moe", "sft", 4, None, 1, 0.1, False, {"packing": True}),
    ("llama_tied", "mg", 4, 2, 2, 0.2, True, {"reset_attention_mask": True}),
    ("llama_uneven", "lf", 4, 2, 1, 0.0, False, {}),
    ("llama_uneven", "mg", 2, None, 3, 0.3, False, {}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("toy", "data", "ranks", "fsdp_size", "accumulation", "dropout", "save_async", "options"), SAME_RANKS
)
def test_an_interrupted_run_equals_an_uninterrupted_one(
    rank_pool: RankPool,
    tmp_path: Path,
    toy: str,
    data: str,
    ranks: int,
    fsdp_size: int | None,
    accumulation: int,
    dropout: float,
    save_async: bool,
    options: dict[str, Any],
) -> None:
    """The interruption is a SIGTERM to the last rank alone in step 5, with `save_steps` never reached; the
    uninterrupted run never saves.
    """
    place = Workplace(rank_pool, tmp_path, toy=toy, dropout=dropout, data=data, **options)
    common: dict[str, Any] = {"fsdp_size": fsdp_size, "gradient_accumulation_steps": accumulation}
    whole = place.run("whole", ranks, **common)
    assert ends(whole) == [(0, None)] * ranks
    saving = {**common, "save_steps": 1000, "save_async": save_async, "resume_from_checkpoint": "latest"}
    # The ranks learn of the signal in the message of the next step, and end together after it.
    first = place.run("parts", ranks, stop_at={ranks - 1: HALF - 1}, **saving)
    assert ends(first) == [(143, None)] * ranks
    assert any("No checkpoint" in line for line in first[0]["log"])
    (checkpoint,) = (tmp_path / "parts" / "checkpoints").glob("global_step_*")
    assert checkpoint.name == f"global_step_{HALF}"
    second = place.run("parts", ranks, **saving)
    assert ends(second) == [(0, None)] * ranks
    assert [f"Resumed from {checkpoint} after step {HALF}"] == [
        line for line in second[0]["log"] if line.startswith("Resumed")
    ]
    for rank in range(ranks):
        assert first[rank]["samples"] + second[rank]["samples"] == whole[rank]["samples"]
    place.same("parts", "whole")


# options of the data, of section `parallel`, and of the training
OTHER_STATE = {
    "loss scaling": ({}, {"param_dtype": "fp16"}, {}),
    "streaming": ({"streaming": True, "buffer_size": 16}, {}, {}),
    "evaluation": ({"val_size": 10}, {}, {"eval_steps": 3}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", OTHER_STATE)
def test_state_beside_the_model(rank_pool: RankPool, tmp_path: Path, case: str) -> None:
    """The loss scaler, a stream's place and the evaluations go on as without an interruption."""
    data, parallel, training = OTHER_STATE[case]
    place = Workplace(rank_pool, tmp_path, **data)
    common: dict[str, Any] = {"parallel": parallel, "gradient_accumulation_steps": 2, **training}
    whole = place.run("whole", 2, **common)
    assert ends(whole) == [(0, None)] * 2
    saving = {**common, "save_steps": 1000, "resume_from_checkpoint": "latest"}
    first = place.run("parts", 2, stop_at={1: 6}, **saving)
    assert ends(first) == [(143, None)] * 2
    second = place.run("parts", 2, **saving)
    assert ends(second) == [(0, None)] * 2
    place.same("parts", "whole")
    if case == "loss scaling":
        # The scale has come down by then, and only then does it matter that it is kept.
        assert any("overflowed" in line for line in first[0]["log"])
        assert not any("overflowed" in line for line in second[0]["log"])
    if case == "evaluation":
        losses = [eval_losses(tmp_path / name) for name in ("parts", "whole")]
        assert losses[0] == losses[1] and len(losses[0]) >= STEPS // 3


@pytest.mark.parametrize(
    ("patch", "dropout"),
    [("optimizer_state_is_not_loaded", 0.0), ("random_state_is_not_restored", 0.2), ("data_starts_over", 0.0)],
)
def test_what_is_not_restored_shows(rank_pool: RankPool, tmp_path: Path, patch: str, dropout: float) -> None:
    place = Workplace(rank_pool, tmp_path, dropout=dropout)
    place.run("whole", 2, save_steps=HALF)
    copy_run(tmp_path / "whole", tmp_path / "parts", HALF)
    resumed: dict[str, Any] = {"save_steps": HALF, "resume_from_checkpoint": "latest"}
    place.run("parts", 2, **resumed)
    place.same("parts", "whole")
    copy_run(tmp_path / "whole", tmp_path / "faulty", HALF)
    assert ends(place.run("faulty", 2, patches=(patch,), **resumed)) == [(0, None)] * 2
    with pytest.raises(AssertionError):
        place.same("faulty", "whole")


# toy, data, (ranks, fsdp_size, accumulation) before and after; the global batch stays at 4 or 8 samples
OTHER_RANKS = [
    ("llama", "sft", (2, None, 2), (4, None, 1)),
    ("llama_uneven", "mg", (4, None, 1), (1, None, 4)),
    ("llama_uneven", "lf", (4, None, 2), (4, 2, 2)),
    ("llama_tied", "mg", (4, 2, 1), (2, None, 2)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("toy", "data", "before", "after"), OTHER_RANKS)
def test_other_ranks_and_other_sharding(
    rank_pool: RankPool, tmp_path: Path, toy: str, data: str, before: tuple, after: tuple
) -> None:
    place = Workplace(rank_pool, tmp_path, toy=toy, data=data)
    ranks, fsdp_size, accumulation = before
    whole = place.run("whole", ranks, fsdp_size=fsdp_size, gradient_accumulation_steps=accumulation, save_steps=HALF)
    copy_run(tmp_path / "whole", tmp_path / "parts", HALF)
    ranks, fsdp_size, accumulation = after
    rest = place.run(
        "parts",
        ranks,
        fsdp_size=fsdp_size,
        gradient_accumulation_steps=accumulation,
        resume_from_checkpoint=str(tmp_path / "parts" / "checkpoints" / f"global_step_{HALF}"),
    )
    assert ends(rest) == [(0, None)] * ranks
    # The same samples in the same global batches, whoever takes them.
    for step in range(STEPS - HALF):
        batches = [
            sorted(row for rank in run for row in rank["samples"][at])
            for run, at in ((whole, HALF + step), (rest, step))
        ]
        assert batches[0] == batches[1]
    found, expected = metrics(tmp_path / "parts"), metrics(tmp_path / "whole")
    assert len(found) == len(expected) == STEPS
    for one, other in zip(found, expected, strict=True):
        assert relative(one["lm_loss"], other["lm_loss"]) < 1e-6, one["iteration"]
        for key in ("iteration", "learning_rate", "consumed_samples", "consumed_tokens"):
            assert one[key] == other[key]


def test_every_record_once_per_epoch(rank_pool: RankPool, tmp_path: Path) -> None:
    """Three epochs of 90 records in three parts on 2, 3 and 4 ranks, with another global batch size each time."""
    place = Workplace(rank_pool, tmp_path, toy="llama_uneven")
    common: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 3.0, "save_steps": 1000, "save_async": True}
    parts = [
        place.run("run", 2, gradient_accumulation_steps=4, stop_at={0: 10}, **common),
        place.run("run", 3, gradient_accumulation_steps=2, stop_at={2: 6}, resume_from_checkpoint="latest", **common),
        place.run("run", 4, gradient_accumulation_steps=5, fsdp_size=2, resume_from_checkpoint="latest", **common),
    ]
    assert [ends(rows)[0] for rows in parts] == [(143, None), (143, None), (0, None)]
    found = Counter(row for rows in parts for rank in rows for step in rank["samples"] for row in step)
    assert len(found) == 90 and set(found.values()) == {3}
    steps = metrics(tmp_path / "run")
    # 11 steps of 8, 7 of 6, and the rest of 270 in steps of 20.
    assert len(steps) == 25
    assert [steps[number - 1]["consumed_samples"] for number in (11, 18, 25)] == [88, 130, 270]
