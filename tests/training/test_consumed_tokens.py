"""Checkpoints that do not say how many tokens went by are gone on from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from mindspeed_llm.checkpoints.files import DamagedCheckpoint
from tests.training.arguments.lines import DENSE, arguments

LINE = "--seq-length 32 --global-batch-size 8"
COUNTERS = {"iteration": 3, "consumed_train_samples": 24}


def state_of(counters: dict[str, Any]) -> Any:
    from mindspeed_llm.training.checkpointing.content import OURS, train_state

    return train_state({OURS: {"state": counters}}, arguments(LINE, base=DENSE), Path("ckpt"))


def loop_of(counters: dict[str, Any], rows_per_sample: int) -> Any:
    from mindspeed_llm.training import loop

    none: Any = None
    with mock.patch.object(loop, "TrainStep"):
        return loop.TrainLoop(
            arguments(LINE, base=DENSE),
            none,
            state_of(counters),
            batches=[],
            valid_batches=[],
            test_batches=[],
            recorder=none,
            profiler=none,
            save=None,
            flops_per_sample=1.0,
            objective=SimpleNamespace(rows_per_sample=rows_per_sample, is_likelihood=True),  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(("rows_per_sample", "expected"), [(1, 24 * 32), (2, 2 * 24 * 32)])
def test_rows_count_as_full(rows_per_sample: int, expected: int) -> None:
    assert loop_of(COUNTERS, rows_per_sample).state.consumed_tokens == expected


def test_what_is_said_is_taken() -> None:
    assert loop_of({**COUNTERS, "consumed_tokens": 500}, 1).state.consumed_tokens == 500


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(DamagedCheckpoint, match="consumed_tokens is 'many', expected a number"):
        state_of({**COUNTERS, "consumed_tokens": "many"})
