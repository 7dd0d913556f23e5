"""Which model a configuration names, and the mistakes that are found before any weight is read.

Built models are compared with transformers on ranks, in tests/distributed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config import ModelConfig
from mindspeed_llm.fsdp2.models import model_factory
from mindspeed_llm.fsdp2.models.model_factory import (
    BuiltModel,
    ModelFactory,
    build_on_meta,
    check_weights,
    load_generation_config,
    load_model_config,
)
from tests.distributed.rows import toy_config
from tests.support.toys import save_toy


def write_config(folder: Path, **fields: Any) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def test_the_family_that_is_named_must_be_the_one_of_the_files(tmp_path: Path) -> None:
    folder = write_config(tmp_path, model_type="qwen3", vocab_size=61)
    assert load_model_config(ModelConfig(model_name_or_path=folder, model_id="qwen3")).vocab_size == 61
    assert load_model_config(ModelConfig(model_name_or_path=folder)).model_type == "qwen3"
    with pytest.raises(UserError, match=r"model\.model_id: qwen3_moe, but .*config\.json has model_type qwen3; remove"):
        load_model_config(ModelConfig(model_name_or_path=folder, model_id="qwen3_moe"))


@pytest.mark.parametrize(
    "text",
    [
        '{"model_type": "no_such_family"}',
        "{",
        "{}",
        "[]",
        '{"model_type": 3}',
        '{"model_type": "llama", "hidden_size": "64"}',
        '{"model_type": "llama", "num_attention_heads": 0}',
        '{"model_type": "llama", "dtype": "nope"}',
    ],
)
def test_an_unusable_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"model\.model_name_or_path: .* has no usable config\.json"):
        load_model_config(ModelConfig(model_name_or_path=str(tmp_path)))


@pytest.mark.parametrize("text", ["[]", "{"])
def test_an_unusable_generation_config(tmp_path: Path, text: str) -> None:
    model = ModelConfig(model_name_or_path=write_config(tmp_path, model_type="llama"))
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"generation_config\.json cannot be read .*; expected a JSON object"):
        load_generation_config(model, load_model_config(model))


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no usable config\.json"):
        load_model_config(ModelConfig(model_name_or_path=str(tmp_path)))


@pytest.mark.parametrize("family", ["t5", "vit"])
def test_a_model_that_is_no_causal_language_model(tmp_path: Path, family: str) -> None:
    config = toy_config(write_config(tmp_path, model_type=family))
    with pytest.raises(UserError, match=rf"transformers has no causal language model for '{family}'"):
        build_on_meta(config, load_model_config(config.model))


def test_a_meta_model_takes_no_memory_and_computes_in_fp32(tmp_path: Path) -> None:
    config = toy_config(str(save_toy("qwen3_moe", tmp_path, dtype=torch.bfloat16)))
    model = build_on_meta(config, load_model_config(config.model))
    assert {(tensor.device.type, tensor.dtype) for tensor in model.parameters()} == {("meta", torch.float32)}
    check_weights(config.model, model)


@pytest.mark.parametrize(("grouped", "experts"), [(True, "grouped_mm"), (False, "eager")])
def test_implementations(tmp_path: Path, grouped: bool, experts: str) -> None:
    folder = str(save_toy("qwen3_moe", tmp_path))
    config = toy_config(folder, optimization={"moe_grouped_gemm": grouped, "use_flash_attn": grouped})
    model = build_on_meta(config, load_model_config(config.model))
    assert model.config._experts_implementation == experts
    assert model.config._attn_implementation == ("mindspeed_attention" if grouped else "sdpa")


def test_the_dtype_of_an_export() -> None:
    built = BuiltModel(
        model=None,
        sharded=None,
        source_config=LlamaConfig(dtype="bfloat16"),
        source_dtypes={"a": torch.float16},
    )
    assert built.export_dtype("a") == torch.float16
    assert built.export_dtype("from scratch") == torch.bfloat16
    nothing = BuiltModel(model=None, sharded=None, source_config=LlamaConfig(), source_dtypes={})
    assert nothing.export_dtype("from scratch") == torch.float32


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("field", ["fsdp_modules", "ignored_modules", "recompute_modules"])
def test_a_pattern_that_matches_nothing_is_found_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meta: bool, scratch: bool, field: str
) -> None:
    def too_early(*args: object, **options: object) -> None:
        raise AssertionError("weights before patterns")

    config = toy_config(
        str(save_toy("llama_uneven", tmp_path)),
        model={"init_model_with_meta_device": meta, "train_from_scratch": scratch},
        parallel={"recompute": True, field: ["model.layer.{*}"]},
    )
    for name in ("load_weights", "initialize_weights"):
        monkeypatch.setattr(model_factory, name, too_early)
    monkeypatch.setattr(model_factory.AutoModelForCausalLM, "from_pretrained", too_early)
    with pytest.raises(UserError, match=rf"parallel\.{field}: .*model\.layer\.\{{\*\}}.* matches no module of Llama"):
        ModelFactory.create(config, mesh=None, device=torch.device("cpu"))


def test_an_adapter_beside_the_weights_of_a_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would add it, or even load the model that its configuration names."""
    folder = save_toy("llama", tmp_path / "snapshot")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folder))
    model = build_on_meta(toy_config(str(folder)), load_model_config(ModelConfig(model_name_or_path=str(folder))))
    hub = ModelConfig(model_name_or_path="organisation/name")
    check_weights(hub, model)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="snapshot holds an adapter too"):
        check_weights(hub, model)
