"""Initial values of models built on the meta device: which pieces are drawn together, and that nothing stays unset.

Equality over topologies, and with the buffers of transformers, is shown on ranks in tests/distributed/test_export.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.models.initialize import (
    _units,
    initialize_computed_buffers,
    initialize_weights,
    local_slices,
    local_tensor,
)
from tests.support.toys import TOYS


def meta_toy(name: str) -> LlamaForCausalLM:
    """The toy on host memory that was never written."""
    fields = dict(TOYS[name])
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(12345)
    return model


def test_a_unit_is_a_layer_or_a_module_outside_of_the_layers() -> None:
    units = [(name, whole) for name, _, _, whole in _units(meta_toy("llama"))]
    assert [name for name, whole in units if whole] == [f"model.layers.{i}" for i in range(4)]
    outside = ["", "model", "model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"]
    assert [name for name, whole in units if not whole] == outside


@pytest.mark.parametrize("toy", ["llama", "llama_tied", "qwen3_moe", "mixtral", "gemma3_text"])
def test_every_parameter_gets_a_value(toy: str) -> None:
    model = meta_toy(toy)
    rng = torch.get_rng_state()
    initialize_weights(model, seed=3)
    assert torch.equal(torch.get_rng_state(), rng)
    for name, parameter in model.named_parameters():
        assert not (parameter == 12345).any() and torch.isfinite(parameter).all(), name


def test_the_draw_depends_on_the_seed_and_the_name_alone() -> None:
    one, two, other = meta_toy("llama"), meta_toy("llama"), meta_toy("llama")
    torch.manual_seed(1)
    initialize_weights(one, seed=3)
    torch.manual_seed(2)
    initialize_weights(two, seed=3)
    initialize_weights(other, seed=4)
    weights = [dict(model.named_parameters()) for model in (one, two, other)]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name])
        assert torch.equal(tensor, weights[2][name]) == (tensor.ndim == 1)
    names = [name for name, tensor in weights[0].items() if "q_proj" in name or "o_proj" in name]
    assert len({tuple(weights[0][name].flatten()[:4].tolist()) for name in names}) == len(names)


class WithParameter(LlamaForCausalLM):
    """Has a parameter that no rule of its class initialises."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.extra = nn.Parameter(torch.empty(3))


class WithBuffer(LlamaForCausalLM):
    """Has a buffer that is not in the files and that its class computes nowhere but in `__init__`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.register_buffer("table", self.value(), persistent=False)

    @staticmethod
    def value() -> torch.Tensor:
        return torch.arange(3.0)


class WithIntegerBuffer(WithBuffer):
    """The same with integers."""

    @staticmethod
    def value() -> torch.Tensor:
        return torch.arange(3)


def odd_model(kind: type[LlamaForCausalLM]) -> Any:
    """A model of an odd class, built on meta and given memory."""
    fields = {**TOYS["llama_uneven"], "num_hidden_layers": 1}
    fields.pop("model_type")
    with torch.device("meta"):
        model = kind(LlamaConfig(**fields))
    return model.to_empty(device="cpu")


def test_a_parameter_that_the_class_does_not_initialise_is_refused() -> None:
    with pytest.raises(UserError, match=r"train_from_scratch: WithParameter gives no initial value .* extra"):
        initialize_weights(odd_model(WithParameter), seed=0)


@pytest.mark.parametrize("kind", [WithBuffer, WithIntegerBuffer])
def test_a_buffer_that_the_class_does_not_compute_is_refused(kind: type[LlamaForCausalLM]) -> None:
    with pytest.raises(UserError, match=rf"{kind.__name__} does not recompute the buffers model\.table .*set it to"):
        initialize_computed_buffers(odd_model(kind))


@pytest.mark.parametrize("toy", ["llama", "qwen3_moe", "gemma3_text"])
def test_computing_buffers_leaves_parameters_alone(toy: str) -> None:
    model = meta_toy(toy)
    initialize_computed_buffers(model)
    fields = dict(TOYS[toy])
    expected = AutoModelForCausalLM.from_config(CONFIG_MAPPING[fields.pop("model_type")](**fields))
    assert all((parameter == 12345).all() for parameter in model.parameters())
    found = dict(model.named_buffers())
    assert found
    for name, buffer in expected.named_buffers():
        assert torch.equal(found[name], buffer), name


def test_a_plain_tensor_is_local_as_a_whole() -> None:
    tensor = nn.Parameter(torch.randn(3, 4))
    assert local_slices(tensor) == (slice(0, 3), slice(0, 4))
    local_tensor(tensor).zero_()
    assert not tensor.any()
