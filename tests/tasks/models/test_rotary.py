"""Frequencies of rotary positions against transformers' functions for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mindspeed_llm.core.rotary import rotary_frequencies
from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.families import by_id
from mindspeed_llm.tasks.models.hf_arguments import hf_arguments

_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: list[tuple[int, float, dict[str, Any]]] = [
    (64, 10000.0, {"rope_type": "linear", "factor": 4.0}),
    (128, 1e6, {"rope_type": "linear", "factor": 2.5}),
    (128, 500000.0, _LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192}),
    (64, 500000.0, _LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}),
    (16, 5000.0, _LLAMA3 | {"factor": 8.0, "high_freq_factor": 2.5, "original_max_position_embeddings": 16}),
    (128, 1e6, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    (64, 10000.0, {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0}),
    (
        64,
        10000.0,
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    ),
    (32, 5000.0, {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.7}),
    (
        32,
        5000.0,
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
    ),
    (
        128,
        150000.0,
        {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    ),
    (16, 10000.0, {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 256}),
]


def by_transformers(dim: int, base: float, scaling: dict[str, Any]) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        head_dim=dim,
        hidden_size=4 * dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={**scaling, "rope_theta": base},
    )
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, device="cpu")


@pytest.mark.parametrize(("dim", "base", "scaling"), CASES)
def test_frequencies_are_those_of_transformers(dim: int, base: float, scaling: dict[str, Any]) -> None:
    expected, factor = by_transformers(dim, base, scaling)
    frequencies, found = rotary_frequencies(dim, base, scaling)
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert found == pytest.approx(factor, rel=1e-12)


def test_without_scaling_each_pair_turns_slower_by_one_factor() -> None:
    frequencies, factor = rotary_frequencies(8, 10000.0, None)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert factor == 1.0


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(UserError, match="'dynamic' is not known here; expected default, linear, llama3 or yarn"):
        rotary_frequencies(8, 10000.0, {"rope_type": "dynamic", "factor": 2.0})


@pytest.mark.parametrize(
    ("dim", "base", "scaling"), [case for case in CASES if case[2].get("truncate", True)], ids=lambda value: str(value)
)
def test_scalings_survive_the_way_through_the_arguments(dim: int, base: float, scaling: dict[str, Any]) -> None:
    from mindspeed_llm.tasks.models.config import _rope_scaling
    from mindspeed_llm.training.arguments.parser import parse

    config = LlamaConfig(
        head_dim=dim,
        hidden_size=4 * dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={**scaling, "rope_theta": base},
    ).to_dict()
    args = parse([])
    vars(args).update(hf_arguments(by_id("llama2"), config, "config.json"))
    expected, factor = by_transformers(dim, base, scaling)
    frequencies, found = rotary_frequencies(dim, args.rotary_base, _rope_scaling(args))
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert found == pytest.approx(factor, rel=1e-12)
