"""Masks, positions and documents of batches, by hand and against megatron-core's own masks."""

import numpy as np
import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.training.data.batches import make_batch
from mindspeed_llm.training.data.tokens import TokenRules

E, P = 9, 8
ALL = {"isolates_documents": True, "restarts_positions": True, "masks_eod": True}


def _batch(*rows, **rules):
    rules = TokenRules(**{"vocab_size": 10, "eod_id": E, **rules})
    return make_batch([np.array(row) for row in rows], rules, source="data,")


def test_a_batch_without_rules():
    batch = _batch([1, E, 3, 4], [5, 6, 7, E], eod_id=None)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "tokens": [[1, E, 3], [5, 6, 7]],
        "labels": [[E, 3, 4], [6, 7, E]],
        "loss_mask": [[1, 1, 1], [1, 1, 1]],
        "position_ids": [[0, 1, 2], [0, 1, 2]],
    }
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
    }
    assert all(tensor.is_contiguous() for tensor in batch.values())


def test_rules_by_hand():
    # An end in the middle, two at once, one at the very beginning, one at the very end.
    batch = _batch([1, 2, E, 3, E, E, 4, 5], [E, 1, 2, 3, 4, 5, E, 6], [1, 2, 3, 4, 5, 6, 7, E], **ALL)
    assert batch["documents"].tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1], [0] * 7]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 1, 0, 0, 1], [0, 1, 1, 1, 1, 1, 0], [1] * 7]
    # The end itself is a target.
    assert batch["labels"][2].tolist() == [2, 3, 4, 5, 6, 7, E]
    assert batch["documents"].dtype == torch.int64


def test_each_rule_by_itself():
    row = [1, E, 3, 4]
    assert _batch(row, isolates_documents=True)["documents"].tolist() == [[0, 0, 1]]
    for rule, name, expected in (
        ("restarts_positions", "position_ids", [[0, 1, 0]]),
        ("masks_eod", "loss_mask", [[1, 0, 1]]),
    ):
        changed, plain = _batch(row, **{rule: True}), _batch(row)
        assert changed.keys() == plain.keys() and changed[name].tolist() == expected
        assert [other for other in plain if not torch.equal(plain[other], changed[other])] == [name]


def test_padding_is_no_target_but_remains():
    batch = _batch([1, P, P, 3, 4], pad_id=P)
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1]]
    assert batch["tokens"].tolist() == [[1, P, P, 3]]


@pytest.mark.parametrize("rules", [ALL, *({name: True} for name in ALL)], ids=["all", *ALL])
def test_equal_to_megatron_cores_masks(rules):
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    rows = np.random.RandomState(1).choice(10, size=(40, 24), p=[0.075] * 9 + [0.325])
    batch = _batch(*rows, **rules)
    for i in range(len(rows)):
        hidden, mask, positions = gpt._get_ltor_masks_and_position_ids(
            torch.from_numpy(rows[i, :-1]),
            E,
            rules.get("restarts_positions", False),
            rules.get("isolates_documents", False),
            rules.get("masks_eod", False),
            True,
        )
        assert torch.equal(batch["loss_mask"][i], mask) and torch.equal(batch["position_ids"][i], positions)
        if "documents" in batch:
            number = batch["documents"][i]
            assert torch.equal((number[:, None] == number[None, :]).tril(), ~hidden[0])


@pytest.mark.parametrize("wrong", [10, -1])
def test_ids_that_are_none(wrong):
    with pytest.raises(UserError, match=rf"data, holds token {wrong}, but the model's vocabulary has 10"):
        _batch([1, 2, 3], [4, 5, wrong])
    # Also where it is the last target.
    assert _batch([1, 2, 9])["labels"].tolist() == [[2, 9]]


def test_batches_do_not_share_memory_with_the_data():
    row = np.array([1, 2, 3, 4])
    batch = make_batch([row], TokenRules(vocab_size=10), source="data,")
    batch["tokens"][:] = 0
    batch["position_ids"] += 1
    assert row.tolist() == [1, 2, 3, 4]
    assert make_batch([row], TokenRules(vocab_size=10), source="data,")["position_ids"].tolist() == [[0, 1, 2]]
