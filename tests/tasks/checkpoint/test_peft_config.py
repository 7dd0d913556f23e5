"""Rules for adapter_config.json against PEFT's own classes; in use in test_peft_mistakes.py and tests/fsdp2."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.peft_config import ALIKE, NOT_OF_WEIGHTS, PLAIN, read_peft_config


def write(folder: Path, **changes: Any) -> Path:
    """What PEFT saves for a plain adapter, with changes."""
    LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(str(folder))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def test_what_peft_saves_is_read(tmp_path: Path) -> None:
    for may_vary in (False, True):
        config = read_peft_config(write(tmp_path), may_vary=may_vary)
        assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 6, ["q_proj"])


def test_every_variant_of_peft_has_a_rule() -> None:
    """A variant of a later PEFT must not pass for a product of two matrices."""
    variants = {field.name for field in dataclasses.fields(LoraConfig) if field.metadata.get("is_lora_variant")}
    assert "use_dora" in variants
    assert variants <= PLAIN.keys()
    # PEFT switches a variant on by any value that counts as true.
    assert not any(value for name in variants for value in PLAIN[name])


@pytest.mark.parametrize("name", sorted(PLAIN | ALIKE))
def test_each_setting_is_refused_where_it_has_an_effect(tmp_path: Path, name: str) -> None:
    value = {"q_proj": 2} if name.endswith("_pattern") else [1] if name == "layers_to_transform" else True
    path = write(tmp_path, **{name: value})
    with pytest.raises(UserError, match=f"{name} .*; only alpha / r"):
        read_peft_config(path)
    if name in ALIKE:
        assert read_peft_config(path, may_vary=True)[name] == value
    else:
        with pytest.raises(UserError, match=f"{name} True; only alpha / r") as error:
            read_peft_config(path, may_vary=True)
        assert ("Merge it into the model" in str(error.value)) == (name not in NOT_OF_WEIGHTS)


@pytest.mark.parametrize("begun", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "PiSSA"])
def test_ways_to_begin_that_change_the_model(tmp_path: Path, begun: str) -> None:
    for may_vary in (False, True):
        with pytest.raises(UserError, match="changed the weights of the model, too"):
            read_peft_config(write(tmp_path, init_lora_weights=begun), may_vary=may_vary)


@pytest.mark.parametrize("begun", [True, False, "gaussian", "eva", "orthogonal"])
def test_ways_to_begin_that_do_not(tmp_path: Path, begun: bool | str) -> None:
    assert read_peft_config(write(tmp_path, init_lora_weights=begun))["init_lora_weights"] == begun


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_alpha": 0},
        {"r": True},
        {"r": 4.0},
        {"rank_pattern": {"q_proj": 0}},
        {"rank_pattern": [8]},
        {"alpha_pattern": {"q_proj": 0}},
        {"alpha_pattern": {"q_proj": float("nan")}},
    ],
)
def test_numbers_that_cannot_be(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"adapter_config\.json: .*; expected"):
        read_peft_config(write(tmp_path, **changes), may_vary=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{x", r"no valid JSON \(Expecting property name .*line 1 column 2"),
        ("[]", "holds a list, expected a JSON object"),
        ('{"peft_type": "LORA", "lora_alpha": 8}', "it has no r; copy"),
        ("{}", "it has no peft_type, r, lora_alpha; copy"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(UserError, match=rf"adapter_config\.json: not the configuration of a.*{message}"):
        read_peft_config(tmp_path / "adapter_config.json")
