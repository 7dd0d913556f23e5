"""Token-weighted cross entropy against transformers' own loss and against arithmetic by hand."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from mindspeed_llm.tasks.losses.cross_entropy import IGNORE_INDEX, count_targets, cross_entropy_sum, shift_labels


def test_equals_transformers_loss_times_its_token_count() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 7, 11, dtype=torch.float64).float().requires_grad_()
    labels = torch.randint(0, 11, (3, 7))
    labels[0, :5] = IGNORE_INDEX
    labels[2, 3] = IGNORE_INDEX
    shifted = shift_labels(labels)
    ours = cross_entropy_sum(logits, shifted)
    (ours_grad,) = torch.autograd.grad(ours, logits)
    theirs = ForCausalLMLoss(logits, labels, vocab_size=11, num_items_in_batch=1)
    (theirs_grad,) = torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours_grad, theirs_grad)
    assert count_targets(shifted) == 2 + 6 + 5


def test_by_hand() -> None:
    # Two classes with logits (0, ln 3): probabilities 1/4 and 3/4.
    logits = torch.tensor([[[0.0, math.log(3.0)], [0.0, math.log(3.0)], [0.0, 0.0]]])
    labels = torch.tensor([[0, 1, IGNORE_INDEX]])
    assert cross_entropy_sum(logits, labels).item() == pytest.approx(math.log(4) + math.log(4 / 3))


def test_no_target_gives_zero_and_a_zero_gradient() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    labels = torch.full((2, 3), IGNORE_INDEX)
    loss = cross_entropy_sum(logits, labels)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros_like(logits))


def test_low_precision_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(1, 4096, 8).bfloat16()
    labels = torch.randint(0, 8, (1, 4096))
    loss = cross_entropy_sum(logits, labels)
    assert loss.dtype == torch.float32
    expected = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


def test_shift_by_hand() -> None:
    labels = torch.tensor([[5, 6, 7], [8, IGNORE_INDEX, 9]])
    assert shift_labels(labels).tolist() == [[6, 7, IGNORE_INDEX], [IGNORE_INDEX, 9, IGNORE_INDEX]]
