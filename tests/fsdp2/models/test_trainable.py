"""Where adapters go, how they begin, and what is refused before anything heavy happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.checkpoint.adapter_names import is_adapter, name_in_file, original_name
from mindspeed_llm.fsdp2.config import ModelConfig
from mindspeed_llm.fsdp2.models.adapters import adapters_off, fill_adapters, lora_targets
from mindspeed_llm.fsdp2.models.trainable import choose_trainable
from tests.fsdp2.train.adapter_rows import peft_adapter
from tests.support.toys import build_toy, save_toy

IDS = torch.arange(3, 43).reshape(2, 20)


def config(**fields: Any) -> ModelConfig:
    return ModelConfig(model_name_or_path="model", **fields)


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("toy", ["llama", "llama_tied", "gemma3_text"])
def test_all_is_what_peft_calls_all_linear(toy: str) -> None:
    model, theirs = build_toy(toy), build_toy(toy)
    lora = choose_trainable(model, config(lora_rank=2))
    adapted = get_peft_model(theirs, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert trained(model) == {name.removeprefix("base_model.model.") for name in trained(adapted)}
    assert lora is not None and lora.lora_alpha == 4  # twice the rank


def test_experts_and_routers_are_no_linear_layers() -> None:
    """They are stacks of matrices: `all` is the attention there."""
    assert lora_targets(build_toy("qwen3_moe"), "all") == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_names_choose_layers_as_peft_does() -> None:
    model = build_toy("llama")
    choose_trainable(model, config(lora_rank=2, lora_target="v_proj, layers.1.mlp.up_proj, lm_head"))
    places = {original_name(name).partition(".lora_")[0] for name in trained(model)}
    assert places == {
        *(f"model.layers.{i}.self_attn.v_proj" for i in range(4)),
        "model.layers.1.mlp.up_proj",
        "lm_head",
    }


def test_adapters_begin_without_effect_and_the_same_for_a_seed() -> None:
    plain = build_toy("llama")
    with torch.no_grad():
        before = plain(input_ids=IDS).logits
    values = []
    for seed in (1, 1, 2):
        model = build_toy("llama")
        choose_trainable(model, config(lora_rank=4))
        fill_adapters(model, config(lora_rank=4), seed=seed)
        with torch.no_grad():
            assert torch.equal(model(input_ids=IDS).logits, before)
        values.append({name: p.detach() for name, p in model.named_parameters() if is_adapter(name)})
    a = "model.layers.2.mlp.down_proj.lora_A.default.weight"
    # As torch's linear layers begin: uniform within 1 / sqrt(inputs); variance 1 / (3 inputs).
    assert values[0][a].abs().max() <= 88**-0.5
    assert 0.7 < values[0][a].var().item() * 3 * 88 < 1.3
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    assert not torch.equal(values[0][a], values[2][a])
    assert not torch.equal(values[0][a], values[0][a.replace(".2.", ".1.")])


def test_adapters_can_be_switched_off_without_touching_what_is_trained(tmp_path: Path) -> None:
    folder = save_toy("llama", tmp_path / "model")
    adapter = peft_adapter(folder, tmp_path / "adapter", targets=["q_proj", "down_proj"])
    model = build_toy("llama")
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        choose_trainable(model, config(adapter_name_or_path=adapter))
        fill_adapters(model, config(adapter_name_or_path=adapter), seed=0)
        names = trained(model)
        on = model(input_ids=IDS).logits
        with adapters_off(model):
            assert torch.equal(model(input_ids=IDS).logits, before)
            assert trained(model) == names
        assert torch.equal(model(input_ids=IDS).logits, on)
    assert not torch.allclose(on, before)
    assert names and all(is_adapter(name) for name in names)


def test_names_of_files() -> None:
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert name_in_file(name) == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert original_name("model.layers.0.self_attn.q_proj.base_layer.bias") == "model.layers.0.self_attn.q_proj.bias"
    assert not is_adapter("model.layers.0.self_attn.q_proj.base_layer.weight")


@pytest.mark.parametrize(
    ("toy", "target", "parts"),
    [
        ("llama", "query", ["model.lora_target: 'query' matches no module", "q_proj", "or all"]),
        ("llama", "mlp", ["'mlp' matches model.layers.0.mlp, which is no linear layer (LlamaMLP)"]),
        ("llama", "embed_tokens", ["is no linear layer (Embedding)"]),
        ("llama_tied", "lm_head", ["'lm_head' is the output head", "tie_word_embeddings"]),
        ("qwen3_moe", "gate_up_proj", ["'gate_up_proj' matches no module"]),
    ],
)
def test_targets_that_do_not_work(toy: str, target: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        lora_targets(build_toy(toy), target)
    assert [part for part in parts if part not in str(error.value)] == []


def test_a_frozen_model_and_a_pattern_without_a_match() -> None:
    with pytest.raises(UserError, match=r"model.freeze_modules = .* freezes the whole model"):
        choose_trainable(build_toy("llama"), config(freeze_modules=["model", "lm_head"]))
    with pytest.raises(UserError, match=r"model.freeze_modules: 'model.layer.0' matches no module"):
        choose_trainable(build_toy("llama"), config(freeze_modules=["model.layer.0"]))


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    folder = save_toy("llama", tmp_path / "model")
    adapter = peft_adapter(folder, tmp_path / "adapter", targets=["q_proj", "down_proj"])
    for other, message in (
        ("llama_odd3", "is an adapter for another model: .* has shape"),
        ("qwen3_moe", "is an adapter for another model: .* have no place"),
    ):
        with pytest.raises(UserError, match=message):
            choose_trainable(build_toy(other), config(adapter_name_or_path=adapter))
    shallow = build_toy("llama")
    shallow.model.layers = shallow.model.layers[:3]
    with pytest.raises(UserError, match="4 of its tensors have no place"):
        choose_trainable(shallow, config(adapter_name_or_path=adapter))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"r": 0}, "has r 0"),
        ({"lora_alpha": 0}, "has lora_alpha 0"),
        ({"use_dora": True}, "has use_dora True"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
    ],
)
def test_adapters_that_are_no_plain_lora(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = save_toy("llama", tmp_path / "model")
    adapter = Path(peft_adapter(folder, tmp_path / "adapter", targets=["q_proj"]))
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        choose_trainable(build_toy("llama"), config(adapter_name_or_path=str(adapter)))
    with pytest.raises(UserError, match="holds a model"):
        choose_trainable(build_toy("llama"), config(adapter_name_or_path=str(folder)))
    (adapter / "adapter_model.safetensors").unlink()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"peft_type": "LORA", "r": 4, "lora_alpha": 6}))
    with pytest.raises(UserError):
        choose_trainable(build_toy("llama"), config(adapter_name_or_path=str(adapter)))
