"""Where adapters go, how they begin, and what is refused before anything heavy happens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

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
        ("llama_tied", "embed_tokens", ["such as down_proj, q_proj, v_proj, or all"]),
        ("llama_tied", "lm_head", ["'lm_head' is the output head", "tie_word_embeddings"]),
        ("qwen3_moe", "gate_up_proj", ["'gate_up_proj' matches no module"]),
    ],
)
def test_targets_that_do_not_work(toy: str, target: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        lora_targets(build_toy(toy), target)
    assert [part for part in parts if part not in str(error.value)] == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_holds_no_numbers(tmp_path: Path, value: float) -> None:
    """Guards against a run that fails at its first step and blames the data."""
    folder = save_toy("llama", tmp_path / "model")
    adapter = peft_adapter(folder, tmp_path / "adapter", targets=["q_proj"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight"
    tensors[name][3, 1] = value
    save_file(tensors, path)
    model = build_toy("llama")
    choose_trainable(model, config(adapter_name_or_path=adapter))
    with pytest.raises(UserError, match=rf"^{re.escape(f'model.adapter_name_or_path = {adapter!r}')}.*in {name} first"):
        fill_adapters(model, config(adapter_name_or_path=adapter), seed=0)


def test_adapters_name_the_folder_of_their_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT looks for it from whatever folder it is started in."""
    (tmp_path / "model").mkdir()
    for where, expected in ((tmp_path, str(tmp_path / "model")), (Path("/"), "model")):
        monkeypatch.chdir(where)
        lora = choose_trainable(build_toy("llama"), config(lora_rank=2))
        assert lora is not None and lora.base_model_name_or_path == expected


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
        ({"r": 0}, "r 0, lora_alpha 6; expected"),
        ({"lora_alpha": 0}, "r 4, lora_alpha 0; expected"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern {'q_proj': 0}; expected"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern {'q_proj': '8'}; expected"),
        ({"use_dora": True}, "use_dora True; only"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changed the weights of the model, too"),
        ({"init_lora_weights": "olora"}, "init_lora_weights 'olora' changed"),
    ],
)
def test_adapters_that_are_no_plain_lora(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = save_toy("llama", tmp_path / "model")
    adapter = Path(peft_adapter(folder, tmp_path / "adapter", targets=["q_proj"]))
    path = adapter / "adapter_config.json"
    saved = path.read_text()
    path.write_text(json.dumps(json.loads(saved) | changes))
    with pytest.raises(UserError, match=rf"^model\.adapter_name_or_path: .*adapter_config\.json: {message}"):
        choose_trainable(build_toy("llama"), config(adapter_name_or_path=str(adapter)))
    with pytest.raises(UserError, match="holds a model"):
        choose_trainable(build_toy("llama"), config(adapter_name_or_path=str(folder)))
    path.write_text(saved)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no adapter_model\.safetensors"):
        choose_trainable(build_toy("llama"), config(adapter_name_or_path=str(adapter)))


@pytest.mark.parametrize("begun", ["pissa", "olora"])
def test_an_adapter_that_peft_began_by_changing_the_model(tmp_path: Path, begun: str) -> None:
    """PEFT itself begins and saves it; its two matrices belong to weights that the model's folder does not have."""
    adapted = get_peft_model(build_toy("llama"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=begun))
    adapted.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"init_lora_weights '{begun}' changed"):
        choose_trainable(build_toy("llama"), config(adapter_name_or_path=str(tmp_path)))


@pytest.mark.parametrize("changes", [{"use_rslora": True}, {"alpha_pattern": {"layers.1.self_attn.q_proj": 16}}])
def test_adapters_that_count_otherwise(tmp_path: Path, changes: dict[str, Any]) -> None:
    """What the converter refuses is right here: layers are PEFT's own."""
    folder = save_toy("llama", tmp_path / "model")
    adapter = Path(peft_adapter(folder, tmp_path / "adapter", targets=["q_proj"]))
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    model = build_toy("llama")
    choose_trainable(model, config(adapter_name_or_path=str(adapter)))
    fill_adapters(model, config(adapter_name_or_path=str(adapter)), seed=0)
    theirs = PeftModel.from_pretrained(build_toy("llama"), str(adapter))
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, theirs(input_ids=IDS).logits)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_adapter_on_a_tied_head(tmp_path: Path, device: str) -> None:
    folder = save_toy("llama_tied", tmp_path / "model")
    targets = ["q_proj", "lm_head"]
    adapter = peft_adapter(folder, tmp_path / "adapter", targets=targets, save_embedding_layers=False)
    with pytest.raises(UserError, match=r"^model\.adapter_name_or_path = .* output head, .* \(tie_word_embeddings\)"):
        choose_trainable(build_toy("llama_tied").to(device), config(adapter_name_or_path=adapter))


def test_weights_of_the_model_in_the_file_of_an_adapter(tmp_path: Path) -> None:
    """PEFT saves those of an adapted head, unless it is told not to."""
    folder = save_toy("llama", tmp_path / "model")
    adapter = peft_adapter(folder, tmp_path / "adapter", targets=["q_proj", "lm_head"])
    with pytest.raises(UserError, match=r"lm_head\.base_layer\.weight.*save_embedding_layers=False"):
        choose_trainable(build_toy("llama"), config(adapter_name_or_path=adapter))
    adapter = peft_adapter(folder, tmp_path / "less", targets=["q_proj", "lm_head"], save_embedding_layers=False)
    model = build_toy("llama")
    choose_trainable(model, config(adapter_name_or_path=adapter))
    assert any(name.startswith("lm_head.lora_A") for name in trained(model))
