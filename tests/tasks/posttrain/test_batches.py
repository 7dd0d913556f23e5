"""Batches of instruction rows, each written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.posttrain.instruction_batches import RowRules, instruction_batch
from mindspeed_llm.training.objective import token_loss

NONE = -100


def row(ids: list[int], labels: list[int], mask: list[int] | None = None) -> dict[str, np.ndarray]:
    lists = {"input_ids": ids, "labels": labels, "attention_mask": mask or [1] * len(ids)}
    return {name: np.array(numbers, dtype=np.int64) for name, numbers in lists.items()}


def rules(**changes: object) -> RowRules:
    return RowRules(**{"vocab_size": 20, "pad_id": 9, "length": 8, **changes})  # type: ignore[arg-type]


def lists(rows: list[dict[str, np.ndarray]], **changes: object) -> dict[str, list[list[float]]]:
    return {name: tensor.tolist() for name, tensor in instruction_batch(rows, rules(**changes), source="d").items()}


def test_labels_are_those_of_the_next_token() -> None:
    found = lists([row([1, 2, 3, 4], [NONE, NONE, 3, 4])])
    assert found == {
        "tokens": [[1, 2, 3, 4, 9, 9, 9, 9]],
        "labels": [[0, 3, 4, 0, 0, 0, 0, 0]],
        "loss_mask": [[0, 1, 1, 0, 0, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 4, 5, 6, 7]],
    }


def test_types_are_those_of_pretraining() -> None:
    batch = instruction_batch([row([1, 2], [1, 2])], rules(isolates_samples=True), source="d")
    types = {name: tensor.dtype for name, tensor in batch.items()}
    assert types.pop("loss_mask") == torch.float32
    assert set(types.values()) == {torch.int64}


def test_samples_of_a_row_are_told_apart() -> None:
    """The label of a first token would be predicted from the sample before it."""
    packed = row([1, 2, 3, 4, 5, 6, 9], [NONE, 2, 3, 4, NONE, 6, NONE], [1, 1, 1, 2, 2, 2, 0])
    found = lists([packed], isolates_samples=True, restarts_positions=True)
    assert found["documents"] == [[0, 0, 0, 1, 1, 1, 2, 2]]
    assert found["position_ids"] == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert found["labels"] == [[2, 3, 0, 0, 6, 0, 0, 0]]
    assert found["loss_mask"] == [[1, 1, 0, 0, 1, 0, 0, 0]]


def test_samples_that_see_each_other_are_one_text() -> None:
    packed = row([1, 2, 3, 4], [NONE, 2, 3, 4], [1, 1, 2, 2])
    found = lists([packed])
    assert "documents" not in found
    assert found["loss_mask"] == [[1, 1, 1, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize(("longest", "multiple", "expected"), [(3, 1, 3), (3, 2, 4), (5, 4, 8), (8, 3, 8), (1, 4, 4)])
def test_length_of_a_batch(longest: int, multiple: int, expected: int) -> None:
    rows = [row([1] * longest, [1] * longest), row([1], [NONE])]
    assert instruction_batch(rows, rules(multiple=multiple), source="d")["tokens"].shape == (2, expected)


@pytest.mark.parametrize(
    ("ids", "labels", "token"), [([1, 20], [NONE, 1], 20), ([1, -1], [NONE, 1], -1), ([1, 2], [NONE, 25], 25)]
)
def test_a_token_of_another_vocabulary(ids: list[int], labels: list[int], token: int) -> None:
    with pytest.raises(UserError, match=f"training data, samples 0 to 1, holds token {token}, but .* has 20"):
        instruction_batch([row(ids, labels)], rules(), source="training data, samples 0 to 1,")


def test_a_micro_batch_without_targets_adds_zero() -> None:
    batch = instruction_batch([row([1, 2, 3], [NONE] * 3)], rules(), source="d")
    losses = torch.full((1, 8), torch.inf, requires_grad=True)
    total, count, report = token_loss(batch["loss_mask"], losses)
    total.backward()
    assert (total.item(), count.item(), report["lm loss"].tolist()) == (0, 0, [0, 0])
    assert losses.grad is not None and losses.grad.eq(0).all()
