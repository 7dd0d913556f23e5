"""Adapters of PEFT are merged only where nothing else comes out than PEFT itself computes; others are refused with the
reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.adapters import hf_peft
from mindspeed_llm.tasks.inference.adapters.hf_load import load_hf
from tests.support.toys import build_toy
from tests.tasks.inference.hf_rows import ask, expected


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    build_toy("llama").save_pretrained(folder)
    return folder


def save_adapter(config: PeftConfig, base: Path, folder: Path) -> Path:
    """An adapter as PEFT writes it, with effect."""
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=random))
    adapted.save_pretrained(folder)
    return folder


COPIES = lora(layer_replication=[[0, 3], [1, 4]])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (COPIES, r"layer_replication \[\[0, 3\], \[1, 4\]\]; copies of layers share"),
        (lora(alora_invocation_tokens=[7, 8]), r"alora_invocation_tokens \[7, 8\]; the adapter \(aLoRA\)"),
        (lora(lora_bias=True), "cannot be merged into LlamaForCausalLM .*the base layer has no bias"),
        (PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "peft_type 'PROMPT_TUNING'; .*not supported"),
        (PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "peft_type 'PREFIX_TUNING'; .*not supported"),
    ],
    ids=["copied-layers", "alora", "lora-bias", "prompt", "prefix"],
)
def test_what_cannot_be_merged(config: PeftConfig, said: str, base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(config, base, tmp_path)
    with pytest.raises(UserError, match=f"{said}.* generate with PEFT itself") as error:
        load_hf(adapter, "peft", base_model=base)
    assert "--base-model" not in str(error.value), "the model is the right one"


def test_a_wrong_merge_is_noticed(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever setting makes it wrong: PEFT merges copied layers without a word."""
    adapter = save_adapter(COPIES, base, tmp_path)
    monkeypatch.setattr(hf_peft, "_NOT_OF_WEIGHTS", {})
    with pytest.raises(UserError, match="it computes something else than PEFT does with the adapter beside"):
        load_hf(adapter, "peft", base_model=base)


def test_a_bias_of_the_adapter_is_merged_where_layers_have_one(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(3)
    config = Qwen2Config(vocab_size=97, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "base")
    adapter = save_adapter(lora(lora_bias=True), tmp_path / "base", tmp_path / "adapter")
    backend, _ = load_hf(adapter, "peft", base_model=tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    without = expected(plain)
    wanted = expected(PeftModel.from_pretrained(plain, str(adapter)))
    torch.testing.assert_close(ask(backend), wanted, rtol=0, atol=1e-5 * float(wanted.std()))
    assert float((wanted - without).std() / wanted.std()) > 0.01


def test_embeddings_are_merged_where_they_are_no_output_head(base: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], task_type="CAUSAL_LM")
    adapter = save_adapter(config, base, tmp_path / "adapter")
    backend, _ = load_hf(adapter, "peft", base_model=base)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wanted = expected(PeftModel.from_pretrained(plain, str(adapter)))
    torch.testing.assert_close(ask(backend), wanted, rtol=0, atol=1e-5 * float(wanted.std()))
    build_toy("llama_tied").save_pretrained(tmp_path / "tied")
    adapter = save_adapter(config, tmp_path / "tied", tmp_path / "of_tied")
    with pytest.raises(UserError, match="it computes something else than PEFT does with the adapter beside"):
        load_hf(adapter, "peft", base_model=tmp_path / "tied")
    config = LoraConfig(r=2, target_modules=["lm_head", "q_proj"], task_type="CAUSAL_LM")
    adapter = save_adapter(config, tmp_path / "tied", tmp_path / "of_head")
    with pytest.raises(UserError, match=r"the output head, .* would change both.* generate with PEFT itself"):
        load_hf(adapter, "peft", base_model=tmp_path / "tied")


def test_damaged_weights_of_an_adapter(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(lora(use_dora=True), base, tmp_path)
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"adapter_model.safetensors cannot be read .*; copy it again"):
        load_hf(adapter, "peft", base_model=base)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "holds a list"),
        ('{"peft_type": "NEW"}', "peft_type 'NEW'; expected one of .*LORA"),
    ],
)
def test_damaged_descriptions(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(content)
    with pytest.raises(UserError, match=f"adapter_config.json:? {said}"):
        hf_peft.check_mergeable(file)
