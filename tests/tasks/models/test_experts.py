"""Experts: who is chosen and how much each weighs, auxiliary losses, and the balance of loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.pool import RankPool
from tests.tasks.models import auxiliary
from tests.tasks.models.families import EXPERTS, build, token_ids
from tests.tasks.models.results import assert_parity, worst
from tests.tasks.models.topologies import ALLTOALL, EP2, ETP1, GROUPED, PP2, SP, TP2, VPP

pytestmark = pytest.mark.distributed
COMPARE = "tests.tasks.models.rows:compare"
ROWS = "tests.tasks.models.expert_rows"
Family = Callable[[str], Path]


def choices(name: str) -> list[tuple[Tensor, Tensor]]:
    """What transformers' routers choose for the samples: of each layer with experts the indices [tokens, top k], the
    best first, and their weights.
    """
    model, found = build(name), []
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            # (logits, weights, indices)
            module.register_forward_hook(lambda module, inputs, output: found.append((output[2], output[1])))
    with torch.no_grad():
        model(token_ids())
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize(("ranks", "values"), [(1, {}), (2, EP2 | ALLTOALL | GROUPED)], ids=["tp1", "ep2"])
def test_routers_choose_the_same_experts_in_the_same_order(
    rank_pool: RankPool, family: Family, name: str, ranks: int, values: dict[str, Any]
) -> None:
    expected = choices(name)
    for found in rank_pool.run(f"{ROWS}:routing", ranks=ranks, folder=str(family(name)), **values):
        assert len(found) == len(expected)
        for weights, (indices, right) in zip(found, expected, strict=True):
            order = np.argsort(-weights, axis=1)[:, : indices.shape[1]]
            np.testing.assert_array_equal(order, indices.numpy())
            np.testing.assert_allclose(np.take_along_axis(weights, order, axis=1), right.numpy(), rtol=2e-5, atol=1e-6)
            assert ((weights > 0).sum(1) == indices.shape[1]).all(), "experts that are not chosen have no weight"


@pytest.fixture(scope="module")
def with_loss(family: Family) -> Callable[[str, str, int], str]:
    """The name of the directory with the gradients of a model with an auxiliary loss, beside the others."""

    def of(loss: str, name: str, micro: int) -> str:
        directory = f"{loss}_{micro}"
        if not (family(name) / directory).exists():
            auxiliary.save_with(loss, name, family(name) / directory, micro=micro)
        return directory

    return of


def flags(loss: str) -> dict[str, Any]:
    """The arguments that ask for the loss."""
    if loss == "z_loss":
        return {"moe_z_loss_coeff": auxiliary.COEFFICIENT}
    return {"moe_router_load_balancing_type": loss, "moe_aux_loss_coeff": auxiliary.COEFFICIENT}


SPREAD: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "ep2": (2, EP2),
    "pp2-vpp2": (2, PP2 | VPP),
    "tp2-sp": (2, TP2 | SP),
    "ep2-tp2-sp-etp1": (4, EP2 | TP2 | SP | ETP1 | ALLTOALL),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("loss", auxiliary.LOSSES)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("topology", SPREAD)
def test_auxiliary_losses_follow_their_formulas(
    rank_pool: RankPool, family: Family, with_loss: Callable[..., str], loss: str, micro: int, topology: str
) -> None:
    ranks, values = SPREAD[topology]
    if topology == "pp2-vpp2" and micro == 2:
        values = values | {"global_batch_size": 4}
    # Of the loss over the global batch, a micro step is that of all data-parallel ranks together.
    data_parallel = ranks if topology == "ep2" else ranks // 2 if topology.startswith("ep2-tp2") else 1
    step = micro * data_parallel if loss == "global_aux_loss" else micro
    gradients = with_loss(loss, "qwen3-moe", step)
    folder = str(family("qwen3-moe"))
    assert_parity(
        rank_pool.run(
            COMPARE, ranks=ranks, folder=folder, gradients=gradients, micro_batch_size=micro, **values, **flags(loss)
        )
    )


@pytest.mark.parametrize("loss", auxiliary.LOSSES)
def test_auxiliary_losses_of_own_tokens_would_be_wrong(
    rank_pool: RankPool, family: Family, with_loss: Callable[..., str], loss: str
) -> None:
    results = rank_pool.run(
        COMPARE,
        ranks=2,
        folder=str(family("qwen3-moe")),
        gradients=with_loss(loss, "qwen3-moe", 1),
        mutant="auxiliary_losses_of_own_tokens",
        **TP2,
        **SP,
        **flags(loss),
    )
    assert worst(results)["gradients"] > 1e-2


def test_a_loss_that_is_off_is_no_loss(rank_pool: RankPool, family: Family) -> None:
    values = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}
    assert_parity(rank_pool.run(COMPARE, ranks=1, folder=str(family("qwen3-moe")), **values))


@pytest.mark.parametrize(
    ("ranks", "values"),
    [(2, EP2 | ALLTOALL), (4, EP2 | ALLTOALL | GROUPED | TP2 | SP)],
)
def test_the_shared_expert_may_be_computed_while_tokens_travel(
    rank_pool: RankPool, family: Family, ranks: int, values: dict[str, Any]
) -> None:
    folder = str(family("qwen2-moe"))
    assert_parity(rank_pool.run(COMPARE, ranks=ranks, folder=folder, moe_shared_expert_overlap=True, **values))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("values", [ALLTOALL, ALLTOALL | GROUPED | {"moe_pad_expert_input_to_capacity": True}])
@pytest.mark.parametrize(("ranks", "split"), [(1, {}), (2, EP2)])
def test_a_capacity_that_is_enough_drops_nothing(
    rank_pool: RankPool, family: Family, values: dict[str, Any], ranks: int, split: dict[str, Any]
) -> None:
    folder = str(family("qwen3-moe"))
    # Three times an even share: one expert could take every token.
    values = values | split | {"moe_expert_capacity_factor": 3.0}
    assert_parity(rank_pool.run(COMPARE, ranks=ranks, folder=folder, **values))


def test_sigmoid_routers_with_groups_and_a_bias_follow_their_definition(rank_pool: RankPool, family: Family) -> None:
    """DeepSeek-V3 (arXiv:2412.19437), equations 12 to 16: the bias decides who is chosen, not how much they weigh. Each
    of the best groups gives top k / groups experts; by as many of its best a group is judged.
    """
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(3))
    bias = 0.3 * torch.randn(6, generator=torch.Generator().manual_seed(4))
    [found] = rank_pool.run(
        f"{ROWS}:sigmoid_routing",
        ranks=1,
        folder=str(family("qwen3-moe")),
        logits=logits.numpy(),
        bias=bias.numpy(),
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=3,
        moe_router_group_topk=2,
        moe_router_topk=2,
        moe_router_topk_scaling_factor=2.5,
    )
    expected = torch.zeros(50, 6)
    for token, row in enumerate(logits.sigmoid()):
        biased = row + bias
        groups = biased.view(3, 2).amax(1).topk(2).indices
        allowed = [expert for expert in range(6) if expert // 2 in groups.tolist()]
        chosen = sorted(allowed, key=lambda expert: -float(biased[expert]))[:2]
        expected[token, chosen] = 2.5 * row[chosen] / row[chosen].sum()
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("ranks", "values"), [(1, {}), (2, EP2 | ALLTOALL), (2, PP2 | VPP), (4, EP2 | TP2 | SP | ETP1 | ALLTOALL)]
)
def test_the_bias_moves_towards_an_even_load(
    rank_pool: RankPool, family: Family, ranks: int, values: dict[str, Any]
) -> None:
    """Wang et al. 2024 (arXiv:2408.15664), algorithm 1: by one step up below the mean load of the step, else down."""
    found = rank_pool.run(
        f"{ROWS}:updated_bias",
        ranks=ranks,
        folder=str(family("qwen3-moe")),
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.01,
        **values,
    )
    layers = {layer: (load, bias, dtype) for of_rank in found for layer, load, bias, dtype in of_rank}
    assert sorted(layers) == [1, 2, 3, 4]
    for load, bias, dtype in layers.values():
        assert sum(load) == 4 * 32 * 2, "every rank counts the tokens of all"
        expected = 0.01 * np.sign(np.mean(load) - np.array(load))
        np.testing.assert_allclose(bias, expected, rtol=1e-6)
        assert dtype == "torch.float32"


def test_the_bias_stays_in_fp32_in_a_bf16_model(rank_pool: RankPool, family: Family) -> None:
    """Neither what it was when the model was cast to bf16 nor a step is rounded."""
    [found] = rank_pool.run(
        f"{ROWS}:updated_bias",
        ranks=1,
        folder=str(family("qwen3-moe")),
        start=0.3,
        bf16=True,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.001,
    )
    assert {dtype for _, _, _, dtype in found} == {"torch.float32"}
    start, step = np.float32(0.3), np.float32(0.001)
    assert {value for _, _, bias, _ in found for value in bias} <= {float(start + way * step) for way in (-1, 0, 1)}


@pytest.mark.parametrize("router_dtype", [None, "fp32", "fp64"])
def test_the_routers_linear_layer_is_torchs(rank_pool: RankPool, router_dtype: str | None) -> None:
    [errors] = rank_pool.run(f"{ROWS}:gating", ranks=1, router_dtype=router_dtype)
    assert max(errors.values()) == 0.0
