"""Checks of the model directory, of hub ids, and of what config.json says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config import Config, ModelConfig, check_config
from mindspeed_llm.fsdp2.config.adapter_files import warn_of_base

MakeConfig = Callable[..., Config]


def check_model(make_config: MakeConfig, path: object, **fields: Any) -> None:
    changes = {"model.model_name_or_path": str(path), **{f"model.{name}": value for name, value in fields.items()}}
    check_config(make_config(changes), world_size=1)


def refusal(make_config: MakeConfig, path: object, **fields: Any) -> str:
    with pytest.raises(UserError) as error:
        check_model(make_config, path, **fields)
    return str(error.value)


@pytest.mark.parametrize(
    "path", ["./no/model", "../no_model", "/no/such/model", "no_such_model", "a/b/c", "models/qwen/"]
)
def test_local_paths_must_exist(make_config: MakeConfig, path: str) -> None:
    message = refusal(make_config, path)
    assert f"model.model_name_or_path = {path!r} does not exist" in message
    assert "organisation/name" in message


def test_folder_without_config_json(make_config: MakeConfig, tmp_path: Path) -> None:
    assert "holds no config.json" in refusal(make_config, tmp_path)


def test_home_is_not_expanded(make_config: MakeConfig) -> None:
    assert "~ is not expanded" in refusal(make_config, "~/models/qwen3")


@pytest.mark.parametrize("hub_id", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.2-1B", "a/b.c_d"])
def test_hub_ids_pass(make_config: MakeConfig, hub_id: str) -> None:
    check_model(make_config, hub_id)
    check_model(make_config, hub_id, model_id="qwen3")


def test_a_folder_that_looks_like_a_hub_id_is_a_folder(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert "holds no config.json" in refusal(make_config, "org/name")


def test_a_file_is_no_model_directory(make_config: MakeConfig, model_dir: Path) -> None:
    assert "is a file; expected the folder" in refusal(make_config, model_dir / "config.json")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "no valid JSON"),
        ("[]", "holds a list"),
        ("{}", "has no model_type"),
        ('{"model_type": 3}', "has no model_type"),
    ],
)
def test_broken_config_json(make_config: MakeConfig, model_dir: Path, content: str, part: str) -> None:
    (model_dir / "config.json").write_text(content)
    message = refusal(make_config, model_dir)
    assert part in message
    assert "config.json" in message


def test_model_id_must_be_that_of_config_json(make_config: MakeConfig, model_dir: Path) -> None:
    message = refusal(make_config, model_dir, model_id="qwen3_moe")
    assert "model.model_id = qwen3_moe" in message
    assert "model_type qwen3" in message
    check_model(make_config, model_dir, model_id="qwen3")


def test_weights_must_be_there_unless_training_starts_from_scratch(make_config: MakeConfig, model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    assert "holds no weights" in refusal(make_config, model_dir)
    check_model(make_config, model_dir, train_from_scratch=True)
    for name in ("pytorch_model.bin", "weights.pt", "other.safetensors"):
        (model_dir / name).touch()
        check_model(make_config, model_dir)
        (model_dir / name).unlink()
        assert "holds no weights" in refusal(make_config, model_dir)


def test_an_adapter_beside_the_weights_is_refused(make_config: MakeConfig, model_dir: Path) -> None:
    """Guards against weights that nobody named: transformers adds the adapter of a model's folder to the model."""
    (model_dir / "adapter_config.json").write_text("{}")
    message = refusal(make_config, model_dir)
    assert f"model.model_name_or_path: {model_dir} holds an adapter too (adapter_config.json)" in message
    check_model(make_config, model_dir, train_from_scratch=True)


def test_an_index_of_torch_files_counts_only_without_safetensors(make_config: MakeConfig, model_dir: Path) -> None:
    (model_dir / "pytorch_model.bin.index.json").write_text('{"weight_map": {"w": "gone.bin"}}')
    check_model(make_config, model_dir)
    (model_dir / "model.safetensors").unlink()
    message = refusal(make_config, model_dir)
    assert "gone.bin; the download is incomplete" in message


def test_shards_that_the_index_names_must_be_there(make_config: MakeConfig, model_dir: Path) -> None:
    names = [f"model-{number}-of-6.safetensors" for number in range(1, 7)]
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    (model_dir / names[5]).touch()
    message = refusal(make_config, model_dir)
    assert f"{names[0]}, {names[1]}, {names[2]} and 2 more" in message
    assert names[5] not in message
    for name in names:
        (model_dir / name).touch()
    check_model(make_config, model_dir)
    for damaged in ("{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'):
        (model_dir / "model.safetensors.index.json").write_text(damaged)
        assert "no weight_map" in refusal(make_config, model_dir)


def test_tokenizer_folder_must_exist(make_config: MakeConfig, model_dir: Path) -> None:
    message = refusal(make_config, model_dir, tokenizer_name_or_path="./no_tokenizer")
    assert "model.tokenizer_name_or_path = './no_tokenizer' does not exist" in message
    check_model(make_config, model_dir, tokenizer_name_or_path="org/name")


def test_an_adapter_in_the_place_of_a_model(make_config: MakeConfig, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    message = refusal(make_config, adapter)
    assert (
        "holds no config.json but an adapter" in message and "and the adapter as model.adapter_name_or_path" in message
    )
    (adapter / "merged").mkdir()
    (adapter / "merged" / "config.json").write_text("{}")
    assert message != refusal(make_config, adapter)
    assert f"merged into, which is in {adapter / 'merged'}" in refusal(make_config, adapter)


def test_an_adapter_of_a_model_with_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_model.safetensors").touch()

    def warning(said: object, model: str) -> str | None:
        # What PEFT writes.
        LoraConfig(r=4, base_model_name_or_path=said).save_pretrained(str(tmp_path))  # type: ignore[arg-type]
        return warn_of_base(ModelConfig(model_name_or_path=model, adapter_name_or_path=str(tmp_path)))

    monkeypatch.chdir(tmp_path)
    for said, model in (("m", "m"), ("org/m", "/models/m/"), ("/a/m", "../b/m"), (None, "m"), ("", "m")):
        assert warning(said, model) is None, said
    assert warning(f"/x/{tmp_path.name}", ".") is None
    line = warning("llama/m", "models/q")
    assert line is not None and "made for the model 'llama/m'" in line and "= 'models/q' has another name" in line
    assert warn_of_base(ModelConfig(model_name_or_path="m", lora_rank=4)) is None
