"""Features of recomputation: the same gradients bit for bit, less kept, and the right layers computed twice."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_llm.core.recompute import share_of
from tests.support.pool import RankPool

ROWS = "tests.features_manager.recompute_rows"

# Four layers of 24 numbers for each of 6 x 2 tokens, 40 inside MLPs, in fp32; see tests/features_manager/command.py.
_LAYERS, _TOKENS, _HIDDEN, _INNER, _BYTES = 4, 12, 24, 40, 4
_SWIGLU: dict[str, Any] = {"activation": "silu", "gated_linear_unit": True, "add_bias_linear": False}
_MLPS: dict[str, dict[str, Any]] = {
    "gelu": {"activation": "gelu"},
    "swiglu": _SWIGLU,
    "fused_swiglu": {**_SWIGLU, "bias_activation_fusion": True},
    "experts": {**_SWIGLU, "num_experts": 3},
    "shared_expert": {**_SWIGLU, "num_experts": 3, "shared": True},
}
# What of an MLP's width is not kept of each token. GELU and fused SwiGLU: the activation. SwiGLU in single operators:
# silu(gate), up plus its offset, and their product. Experts, of which a token sees two: besides, the product with the
# token's weight; with a shared one besides.
_ACTIVATIONS = {"gelu": 1, "swiglu": 3, "fused_swiglu": 1, "experts": 2 * 4, "shared_expert": 2 * 4 + 3}


def _compare(plain: dict[str, Any], found: dict[str, Any]) -> None:
    import torch

    assert torch.equal(plain["output"], found["output"])
    assert plain["gradients"].keys() == found["gradients"].keys()
    assert not [name for name, value in plain["gradients"].items() if not torch.equal(value, found["gradients"][name])]
    assert all(value.abs().sum() > 0 for name, value in plain["gradients"].items() if "linear" in name)


def _facts(pool: RankPool, flags: str, ranks: int, fields: dict[str, Any]) -> list[dict[str, Any]]:
    if ranks > 1:
        flags += f" --tensor-model-parallel-size {ranks} --num-attention-heads 4"
    return pool.run(f"{ROWS}:block_facts", ranks=ranks, flags=flags, **fields)


@pytest.mark.distributed
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 1) for name in _MLPS), ("gelu", 2), ("swiglu", 2), ("fused_swiglu", 2)]
)
def test_activation_functions_are_computed_again(rank_pool: RankPool, name: str, ranks: int) -> None:
    plain = _facts(rank_pool, "", ranks, _MLPS[name])
    found = _facts(rank_pool, "--recompute-activation-function", ranks, _MLPS[name])
    for before, after in zip(plain, found, strict=True):
        _compare(before, after)
        saved = _LAYERS * _TOKENS * _ACTIVATIONS[name] * _INNER // ranks * _BYTES
        assert before["kept"] - after["kept"] == saved


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_norms_are_computed_again(rank_pool: RankPool, ranks: int) -> None:
    plain = _facts(rank_pool, "", ranks, _SWIGLU)
    found = _facts(rank_pool, "--recompute-norm", ranks, _SWIGLU)
    for before, after in zip(plain, found, strict=True):
        _compare(before, after)
        # Two norms in a layer; of each token the output, the mean and the deviation are not kept.
        assert before["kept"] - after["kept"] == 2 * _LAYERS * _TOKENS * (_HIDDEN + 2) * _BYTES


@pytest.mark.distributed
def test_both_together(rank_pool: RankPool) -> None:
    [plain] = _facts(rank_pool, "", 1, _SWIGLU)
    [norms] = _facts(rank_pool, "--recompute-norm", 1, _SWIGLU)
    [functions] = _facts(rank_pool, "--recompute-activation-function", 1, _SWIGLU)
    [both] = _facts(rank_pool, "--recompute-norm --recompute-activation-function", 1, _SWIGLU)
    _compare(plain, both)
    assert plain["kept"] - both["kept"] == (plain["kept"] - norms["kept"]) + (plain["kept"] - functions["kept"])


def test_shares_of_a_stage() -> None:
    """Layer l of part v is recomputed where l * parts + v is below the number."""
    for parts in (1, 2, 3):
        for number in range(1, 10):
            for part in range(parts):
                by_hand = sum(local * parts + part < number for local in range(20))
                assert share_of(number, part, parts) == by_hand
            assert sum(share_of(number, part, parts) for part in range(parts)) == number


_VIRTUAL = (
    "--num-layers 12 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--recompute-granularity full --recompute-method block"
)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("flags", "first", "second"),
    [
        # Positions of the first stage: 0 1 2 | 6 7 8. megatron-core counts layers of each part.
        ("--recompute-num-layers 2", [2, 2, 1, 2, 2, 1], [2, 2, 1, 2, 2, 1]),
        ("--recompute-num-layers 3 --enable-recompute-layers-per-pp-rank", [2, 2, 1, 2, 1, 1], [2, 2, 1, 2, 1, 1]),
        ("--recompute-num-layers 1 --enable-recompute-layers-per-pp-rank", [2, 1, 1, 1, 1, 1], [2, 1, 1, 1, 1, 1]),
        ("--recompute-num-layers 6 --enable-recompute-layers-per-pp-rank", [2] * 6, [2] * 6),
    ],
)
def test_recomputed_layers_are_counted_over_the_parts_of_a_stage(
    rank_pool: RankPool, flags: str, first: list[int], second: list[int]
) -> None:
    assert rank_pool.run(f"{ROWS}:times_computed", ranks=2, flags=f"{_VIRTUAL} {flags}") == [first, second]


@pytest.mark.distributed
@pytest.mark.parametrize(("flags", "on"), [("--deterministic-mode", True), ("--npu-deterministic", True), ("", False)])
def test_deterministic_mode_reaches_torch_and_megatron_core(rank_pool: RankPool, flags: str, on: bool) -> None:
    [found] = rank_pool.run(f"{ROWS}:deterministic_facts", ranks=1, flags=flags)
    assert found == {"torch": on, "config": on, "embedding": on}
