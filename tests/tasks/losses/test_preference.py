"""The preference losses: by hand, and against their formulas written out once more."""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed_llm.tasks.losses.preference import (
    METRICS,
    PreferenceLoss,
    PreferenceOptions,
    Replies,
    preference_loss,
    reply_log_probs,
)


def loss(
    policy: tuple[float, float],
    reference: tuple[float, float],
    lengths: tuple[int, int] = (1, 1),
    **options: object,
) -> PreferenceLoss:
    """Of one pair; each argument is (chosen, rejected)."""
    chosen, rejected = (
        Replies(torch.tensor([value]), torch.tensor([length])) for value, length in zip(policy, lengths, strict=True)
    )
    return preference_loss(
        policy_chosen=chosen,
        policy_rejected=rejected,
        reference_chosen=torch.tensor([reference[0]]),
        reference_rejected=torch.tensor([reference[1]]),
        options=PreferenceOptions(**options),  # type: ignore[arg-type]
    )


def test_equal_replies_are_a_tie_and_no_win() -> None:
    result = loss((-3.0, -3.0), (-2.0, -2.0))
    assert result.losses.item() == pytest.approx(math.log(2), rel=1e-6)
    assert result.margins.item() == 0.0
    assert result.accuracies.item() == 0.0
    assert result.rewards_chosen.item() == pytest.approx(-0.1)


def test_sigmoid_by_hand() -> None:
    # h = (-1 - -4) - (-2 - -3) = 2; beta h = 1.
    result = loss((-1.0, -4.0), (-2.0, -3.0), beta=0.5)
    assert result.losses.item() == pytest.approx(-math.log(1 / (1 + math.exp(-1))), rel=1e-6)
    assert result.rewards_chosen.item() == pytest.approx(0.5)
    assert result.rewards_rejected.item() == pytest.approx(-0.5)
    assert result.margins.item() == pytest.approx(1.0)
    assert result.accuracies.item() == 1.0
    smooth = loss((-1.0, -4.0), (-2.0, -3.0), beta=0.5, label_smoothing=0.25)
    expected = 0.75 * math.log(1 + math.exp(-1)) + 0.25 * math.log(1 + math.exp(1))
    assert smooth.losses.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("chosen", "expected"), [(-1.0, 0.5), (1.0, 0.0), (-5.0, 2.5)])
def test_hinge_by_hand(chosen: float, expected: float) -> None:
    # beta h = 0.5 (chosen + 2)
    assert loss((chosen, -3.0), (-2.0, -3.0), beta=0.5, loss_type="hinge").losses.item() == pytest.approx(expected)


def test_ipo_by_hand() -> None:
    # Means: chosen (-6 + 8) / 4 = 0.5, rejected (-9 + 6) / 3 = -1; h = 1.5, 1 / (2 beta) = 2.
    result = loss((-6.0, -9.0), (-8.0, -6.0), (4, 3), beta=0.25, loss_type="ipo")
    assert result.losses.item() == pytest.approx(0.25)
    assert result.rewards_chosen.item() == pytest.approx(0.125)
    assert result.rewards_rejected.item() == pytest.approx(-0.25)


def test_the_sft_term_is_a_mean_per_token_of_the_chosen_reply() -> None:
    plain, with_sft = (loss((-6.0, -9.0), (-6.0, -9.0), (4, 3), pref_ftx=factor) for factor in (0.0, 2.0))
    assert with_sft.losses.item() - plain.losses.item() == pytest.approx(2.0 * 6.0 / 4)


def test_log_probs_count_label_0_and_leave_out_what_has_no_target() -> None:
    logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [5.0, 0.0]], [[1.0, 1.0], [3.0, 0.0], [0.0, 0.0]]])
    labels = torch.tensor([[0, 1, -100], [-100, 0, -100]])
    replies = reply_log_probs(logits, labels)
    first = -math.log(1 + math.exp(-2)) - math.log(1 + math.exp(-1))
    assert replies.log_probs.tolist() == pytest.approx([first, -math.log(1 + math.exp(-3))], rel=1e-6)
    assert replies.lengths.tolist() == [2, 1]


def independent(
    logits: torch.Tensor, reference: torch.Tensor, labels: torch.Tensor, kind: str, beta: float, s: float, ftx: float
) -> torch.Tensor:
    """Mean over pairs, token by token in Python; rows are chosen, rejected, chosen, rejected, ..."""
    sums = []
    for model in (logits, reference):
        log_probs = model.double().log_softmax(-1)
        sums.append([sum(log_probs[r, t, y] for t, y in enumerate(row) if y >= 0) for r, row in enumerate(labels)])
    lengths = [sum(int(y) >= 0 for y in row) for row in labels]
    total = torch.zeros((), dtype=torch.float64)
    for c in range(0, len(labels), 2):
        (pc, pr), (rc, rr) = (values[c : c + 2] for values in sums)
        if kind == "ipo":
            pc, pr, rc, rr = pc / lengths[c], pr / lengths[c + 1], rc / lengths[c], rr / lengths[c + 1]
        h = (pc - rc) - (pr - rr)
        if kind == "sigmoid":
            one = (1 - s) * torch.log1p(torch.exp(-beta * h)) + s * torch.log1p(torch.exp(beta * h))
        elif kind == "hinge":
            one = torch.clamp(1 - beta * h, min=0)
        else:
            one = (h - 0.5 / beta) ** 2
        total = total + one - ftx * sums[0][c] / lengths[c]
    return total / (len(labels) // 2)


@pytest.mark.parametrize(
    ("kind", "s", "ftx"),
    [("sigmoid", 0.0, 0.0), ("sigmoid", 0.2, 0.5), ("hinge", 0.0, 0.3), ("ipo", 0.0, 0.0), ("ipo", 0.0, 1.0)],
)
def test_loss_and_gradient_equal_the_formula(kind: str, s: float, ftx: float) -> None:
    generator = torch.Generator().manual_seed(3)
    shape = (6, 7, 11)
    logits = torch.randn(shape, generator=generator).requires_grad_()
    reference = torch.randn(shape, generator=generator)
    labels = torch.randint(0, 11, shape[:2], generator=generator)
    labels[:, 0] = -100
    labels[3, 4:] = -100
    expected = independent(logits, reference, labels, kind, 0.3, s, ftx)
    (wanted,) = torch.autograd.grad(expected, logits)
    policy = reply_log_probs(logits, labels)
    ref = reply_log_probs(reference, labels).log_probs
    result = preference_loss(
        policy_chosen=Replies(policy.log_probs[::2], policy.lengths[::2]),
        policy_rejected=Replies(policy.log_probs[1::2], policy.lengths[1::2]),
        reference_chosen=ref[::2],
        reference_rejected=ref[1::2],
        options=PreferenceOptions(loss_type=kind, beta=0.3, label_smoothing=s, pref_ftx=ftx),  # type: ignore[arg-type]
    )
    (found,) = torch.autograd.grad(result.losses.mean(), logits)
    assert result.losses.mean().item() == pytest.approx(expected.item(), rel=1e-5)
    assert (found - wanted).norm() / wanted.norm() < 1e-5
    sums = result.sums(torch.tensor([1.0, 0.0, 1.0]))
    assert tuple(sums) == METRICS
    assert sums["rewards_margin"].item() == pytest.approx((result.margins[0] + result.margins[2]).item())


def test_a_pair_without_targets_is_no_nan() -> None:
    policy = torch.zeros(1, requires_grad=True)
    empty = Replies(policy, torch.tensor([0]))
    for kind in ("sigmoid", "hinge", "ipo"):
        options = PreferenceOptions(loss_type=kind, pref_ftx=1.0)  # type: ignore[arg-type]
        zero = torch.zeros(1)
        result = preference_loss(
            policy_chosen=empty,
            policy_rejected=empty,
            reference_chosen=zero,
            reference_rejected=zero,
            options=options,
        )
        total = (result.losses * 0.0).sum()
        (gradient,) = torch.autograd.grad(total, policy)
        assert total.item() == 0.0 and gradient.item() == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta 0"),
        ({"loss_type": "kto"}, "sigmoid, hinge, ipo"),
        ({"label_smoothing": 0.5}, "below 0.5"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "belongs to sigmoid"),
        ({"pref_ftx": -1.0}, "below 0"),
    ],
)
def test_options_that_define_no_loss_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreferenceOptions(**options)  # type: ignore[arg-type]
