"""Models filled from a Hugging Face directory compute what transformers computes, however they are spread over ranks.

Logits and the gradients of all parameters, fp32, toys that are odd in every size; the gradients have gone through
megatron-core's own schedule, data-parallel wrapper and final sums.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.pool import RankPool
from tests.tasks.models.families import DENSE, EXPERTS
from tests.tasks.models.results import assert_parity, worst
from tests.tasks.models.topologies import (
    ALLTOALL,
    ANY_MODEL,
    DENSE_ONLY,
    EP2,
    ETP1,
    GROUPED,
    PP2,
    SP,
    TP2,
    VPP,
    WITH_EXPERTS,
    rows,
)

pytestmark = pytest.mark.distributed
ROW = "tests.tasks.models.rows:compare"
ROWS = [*rows(DENSE, ANY_MODEL | DENSE_ONLY), *rows(EXPERTS, ANY_MODEL | WITH_EXPERTS)]
Family = Callable[[str], Path]


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    ("name", "ranks", "values"),
    [pytest.param(name, ranks, values, id=f"{name}-{topology}") for name, topology, ranks, values in ROWS],
)
def test_models_equal_transformers(
    rank_pool: RankPool, family: Family, name: str, ranks: int, values: dict[str, Any]
) -> None:
    assert_parity(rank_pool.run(ROW, ranks=ranks, folder=str(family(name)), **values))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("padded", [640, 1024])
@pytest.mark.parametrize("name", ["llama2", "llama-tied"])
@pytest.mark.parametrize(("ranks", "values"), [(1, {}), (2, TP2), (4, TP2 | SP | PP2)])
def test_padding_of_the_vocabulary_changes_nothing(
    rank_pool: RankPool, family: Family, name: str, padded: int, ranks: int, values: dict[str, Any]
) -> None:
    # With 1024 rows the second of two ranks has padding only.
    assert_parity(rank_pool.run(ROW, ranks=ranks, folder=str(family(name)), padded_vocab_size=padded, **values))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["llama-tied", "qwen25-tied-windows", "qwen3-moe-steps", "qwen2-moe"])
@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (2, PP2 | {"num_layer_list": (1, 3)}),
        (2, PP2 | {"num_layer_list": (3, 1)}),
        (2, PP2 | {"noop_layers": (0, 5)}),
        (2, PP2 | VPP | {"noop_layers": (2, 3)}),
        (1, {"noop_layers": (1,)}),
    ],
    ids=["list-1-3", "list-3-1", "noops-at-the-ends", "noops-in-virtual-stages", "noop-without-stages"],
)
def test_where_layers_stand_changes_nothing(
    rank_pool: RankPool, family: Family, name: str, ranks: int, values: dict[str, Any]
) -> None:
    assert_parity(rank_pool.run(ROW, ranks=ranks, folder=str(family(name)), **values))


FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
UNIFORM, BLOCK = FULL | {"recompute_method": "uniform"}, FULL | {"recompute_method": "block"}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "ranks", "values"),
    [
        ("qwen3", 1, UNIFORM | {"recompute_num_layers": 2}),
        ("qwen3", 2, TP2 | UNIFORM | {"distribute_saved_activations": True}),
        ("mistral", 2, PP2 | VPP | BLOCK),
        ("qwen25", 2, TP2 | SP | selective("core_attn", "layernorm", "mlp")),
        ("qwen3-moe", 2, EP2 | ALLTOALL | UNIFORM),
        ("qwen3-moe", 4, EP2 | TP2 | SP | BLOCK),
        ("qwen2-moe", 2, EP2 | ALLTOALL | GROUPED | selective("core_attn", "layernorm", "moe_act", "shared_experts")),
        ("qwen2-moe", 2, TP2 | SP | ETP1 | selective("moe", "mlp")),
        ("qwen2-moe", 2, PP2 | VPP | GROUPED | UNIFORM),
    ],
)
def test_recomputation_changes_nothing(
    rank_pool: RankPool, family: Family, name: str, ranks: int, values: dict[str, Any]
) -> None:
    assert_parity(rank_pool.run(ROW, ranks=ranks, folder=str(family(name)), **values))


@pytest.mark.parametrize(
    ("mutant", "name", "ranks", "values"),
    [
        ("unscaled_rope", "llama3", 1, {}),
        ("unscaled_rope", "llama-linear", 1, {}),
        ("unscaled_rope", "llama-yarn", 1, {}),
        ("no_rope_factor", "llama-yarn", 1, {}),
        ("swapped_gate_and_up", "llama2", 1, {}),
        ("swapped_gate_and_up", "qwen3-moe", 1, {}),
        ("swapped_gate_and_up", "qwen3-moe", 1, GROUPED),
        ("swapped_key_and_value", "qwen3", 2, TP2),
        ("ungrouped_query_heads", "qwen25", 1, {}),
        ("expert_order", "mixtral", 1, {}),
        ("expert_order", "mixtral", 2, EP2 | GROUPED),
        ("unmasked_padding", "llama2", 1, {}),
        ("window_off_by_one", "mistral", 1, {}),
        ("window_off_by_one", "qwen25-tied-windows", 1, {}),
        ("normalised_router", "qwen2-moe", 1, {}),
        ("ungated_shared_expert", "qwen2-moe", 1, {}),
    ],
)
def test_a_deliberate_fault_breaks_parity(
    rank_pool: RankPool, family: Family, mutant: str, name: str, ranks: int, values: dict[str, Any]
) -> None:
    results = rank_pool.run(ROW, ranks=ranks, folder=str(family(name)), mutant=mutant, **values)
    # Far off, not by rounding.
    assert worst(results)["gradients"] > 1e-3
    with pytest.raises(AssertionError, match=r"differ|padding"):
        assert_parity(results)


@pytest.mark.parametrize(
    ("mutant", "name", "ranks", "values"),
    [
        ("whole_experts_as_dense_layers", "qwen3-moe", 2, TP2 | SP | ETP1),
        ("norms_not_summed", "llama2", 2, TP2 | SP),
    ],
)
def test_a_missing_sum_breaks_the_gradients_alone(
    rank_pool: RankPool, family: Family, mutant: str, name: str, ranks: int, values: dict[str, Any]
) -> None:
    results = rank_pool.run(ROW, ranks=ranks, folder=str(family(name)), mutant=mutant, **values)
    found = worst(results)
    assert found["logits"] <= 1e-5 and found["gradients"] > 0.1
