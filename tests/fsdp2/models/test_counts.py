"""Sizes of models, by hand from their dimensions and against transformers' own count."""

from __future__ import annotations

import pytest

from mindspeed_llm.fsdp2.models.counts import ModelSize, model_size
from tests.support.toys import build_toy

# The toy's dimensions: vocabulary 509, hidden 48, 6 heads and 2 KV heads of 16, 4 layers.
EMBEDDING = 509 * 48
ATTENTION = 48 * (6 * 16) + 2 * 48 * (2 * 16) + (6 * 16) * 48
NORMS = 2 * 48
HEAD_NORMS = 2 * 16
EXPERT = 3 * 48 * 40
LAYER = ATTENTION + 3 * 48 * 88 + NORMS


@pytest.mark.parametrize(
    ("toy", "total", "active"),
    [
        # The input embedding is looked up, not multiplied.
        ("llama", 2 * EMBEDDING + 4 * LAYER + 48, EMBEDDING + 4 * LAYER + 48),
        # Tied: the same matrix is the head.
        ("llama_tied", EMBEDDING + 4 * LAYER + 48, EMBEDDING + 4 * LAYER + 48),
        ("qwen3", 2 * EMBEDDING + 4 * (LAYER + HEAD_NORMS) + 48, EMBEDDING + 4 * (LAYER + HEAD_NORMS) + 48),
        # 2 of 6 experts see a token; the router sees all.
        (
            "qwen3_moe",
            2 * EMBEDDING + 4 * (ATTENTION + NORMS + HEAD_NORMS + 6 * 48 + 6 * EXPERT) + 48,
            EMBEDDING + 4 * (ATTENTION + NORMS + HEAD_NORMS + 6 * 48 + 2 * EXPERT) + 48,
        ),
        (
            "mixtral",
            2 * EMBEDDING + 4 * (ATTENTION + NORMS + 6 * 48 + 6 * 3 * 48 * 88) + 48,
            EMBEDDING + 4 * (ATTENTION + NORMS + 6 * 48 + 2 * 3 * 48 * 88) + 48,
        ),
    ],
)
def test_parameters(toy: str, total: int, active: int) -> None:
    model = build_toy(toy)
    assert model_size(model) == ModelSize(
        total=total,
        trainable=total,
        active=active,
        active_frozen=0,
        layers=4,
        hidden=48,
        heads=6,
        head_dim=16,
        vocabulary=509,
    )
    assert model.num_parameters() == total


def test_the_head_dimension_follows_from_the_hidden_size_where_the_configuration_has_none() -> None:
    size = model_size(build_toy("llama", head_dim=None))
    assert (size.heads, size.head_dim) == (6, 8)


def test_frozen_parameters() -> None:
    model = build_toy("llama")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    found, whole = model_size(model), model_size(build_toy("llama"))
    assert (found.total, found.active) == (whole.total, whole.active)
    assert found.trainable == whole.total - EMBEDDING - LAYER
    # An input embedding is looked up and not multiplied with.
    assert found.active_frozen == LAYER
