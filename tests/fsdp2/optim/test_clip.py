"""Gradient norm and clipping over shards against torch's `clip_grad_norm_` over whole gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mindspeed_llm.fsdp2.optim.clip import clip_factor, gradient_norm, scale_gradients
from tests.support.pool import RankPool


def parameters_with(gradients: list[torch.Tensor]) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        parameters.append(parameter)
    return parameters


def random_gradients(scale: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(7, 5), (1, 4), (9,), (3, 2, 2), ()]
    return [scale * torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2, 4])  # one row on two or four ranks leaves some with an empty shard
@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_sharded_gradients_are_clipped_as_whole_ones(rank_pool: RankPool, ranks: int, scale: float) -> None:
    gradients = random_gradients(scale)
    expected = parameters_with(gradients)
    norm = torch.nn.utils.clip_grad_norm_(expected, 1.0)
    assert (norm < 1.0) == (scale < 1)
    rows = rank_pool.run("tests.fsdp2.optim.rows:clip", ranks=ranks, gradients=gradients, whole=[2, 4], max_norm=1.0)
    for row in rows:
        assert torch.equal(row["norm"], rows[0]["norm"])
        torch.testing.assert_close(row["norm"], norm, rtol=1e-6, atol=0)
        for mine, theirs in zip(row["clipped"], expected, strict=True):
            torch.testing.assert_close(mine, theirs.grad, rtol=1e-6, atol=0)


def test_the_norm_by_hand() -> None:
    parameters = parameters_with([torch.tensor([3.0, 0.0]), torch.tensor([[4.0], [12.0]])])
    assert gradient_norm(parameters, None).item() == 13.0
    assert clip_factor(torch.tensor(13.0), 6.5).item() == pytest.approx(0.5)
    assert clip_factor(torch.tensor(13.0), 20.0).item() == 1.0
    scale_gradients(parameters, 0.5)
    assert parameters[0].grad.tolist() == [1.5, 0.0]


def test_half_precision_gradients_are_summed_in_fp32() -> None:
    parameters = parameters_with([torch.full((300, 300), 2.0, dtype=torch.float16)])
    norm = gradient_norm(parameters, None)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(600.0)  # 2^2 * 90000 exceeds fp16


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_gradient_shows_in_the_norm(bad: float) -> None:
    assert not gradient_norm(parameters_with([torch.ones(3), torch.tensor([1.0, bad])]), None).isfinite()
