"""Adapters in PEFT's files that cannot be converted, and those that can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_llm.errors import UserError
from tests.tasks.checkpoint import lora_files, toys
from tests.tasks.checkpoint.lora_files import ALPHA, RANK
from tests.tasks.checkpoint.lora_merging import FUSED, merge
from tests.tasks.checkpoint.test_lora_merge import Made, expect_close

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora True; only alpha / r"),
    "rslora": ({"use_rslora": True}, "use_rslora True"),
    "bias": ({"bias": "all"}, "bias 'all'"),
    "ranks": ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
    "alphas": ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "parameters": ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
    "some layers": ({"layers_to_transform": [1]}, "layers_to_transform"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "changed the weights of the model, too"),
    "another kind": ({"peft_type": "LOHA"}, "peft_type 'LOHA'; expected LORA"),
    "alpha is no number": ({"lora_alpha": float("nan")}, "r 4, lora_alpha nan; expected"),
    "alpha is infinite": ({"lora_alpha": float("inf")}, "r 4, lora_alpha inf; expected"),
    "alpha is true": ({"lora_alpha": True}, "r 4, lora_alpha True; expected"),
    "no rank": ({"r": None}, "r None, lora_alpha 6; expected a whole number above 0"),
    "fewer layers": ({"target_modules": ["q_proj"]}, "target_modules q_proj leave out .*, for which adapter_model"),
    "another rank": (
        {"r": 8},
        r"lora_.\.weight has shape \[.*\], expected \[.*\] from the model's settings and r 8 in .*adapter_config\.json",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_of_peft(name: str, made: Made, base: Path, tmp_path: Path) -> None:
    changes, message = CONFIGS[name]
    adapter = lora_files.save_peft(tmp_path / "peft", made.pairs, **changes)
    with pytest.raises(UserError, match=message):
        merge(base, adapter, tmp_path)


def test_defaults_of_peft_are_plain(made: Made, base: Path, tmp_path: Path) -> None:
    """What PEFT itself writes for a plain adapter, whatever it lists in its configuration."""
    from peft import LoraConfig

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj"], init_lora_weights="gaussian").to_dict()
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    del config["target_modules"]  # the files' own
    adapter = lora_files.save_peft(tmp_path / "peft", made.pairs, **json.loads(json.dumps(config, default=str)))
    changed = json.loads((adapter / "adapter_config.json").read_text()) | {"peft_type": "LORA"}
    (adapter / "adapter_config.json").write_text(json.dumps(changed))
    merge(base, adapter, tmp_path)
    expect_close(tmp_path / "merged", made.expected)


Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no B": ({f"{Q}B.weight": None}, r"layers\.1\.self_attn\.q_proj\.lora_A\.weight has no .*q_proj\.lora_B\.weight"),
    "a layer has none": (
        {f"{Q}A.weight": None, f"{Q}B.weight": None},
        r"has no base_model\.model\.model\.layers\.1\.self_attn\.q_proj\.lora_A\.weight; expected an adapter on",
    ),
    "too many layers": (
        {
            f"{Q.replace('1', '4')}{half}": torch.zeros(shape)
            for half, shape in (("A.weight", (4, 48)), ("B.weight", (48, 4)))
        },
        r"layers\.4.*is for a layer that the model has not",
    ),
    "a module that it has not": (
        {
            f"{Q.replace('q_proj', 'qkv_proj')}{half}": torch.zeros(shape)
            for half, shape in (("A.weight", (4, 48)), ("B.weight", (48, 4)))
        },
        r"qkv_proj.*is for a module that a llama2 model has not; it has mlp\.down_proj",
    ),
    "a whole module": (
        {"base_model.model.lm_head.weight": torch.zeros(509, 48)},
        "lm_head.weight is no lora_A.weight or lora_B.weight behind",
    ),
    "not a number": (
        {f"{Q}A.weight": torch.full((4, 48), float("nan"))},
        r"layers\.1\.self_attn\.q_proj\.lora_A\.weight holds nan; expected finite numbers",
    ),
    "an infinite number": (
        {f"{Q}A.weight": torch.eye(4, 48).div(torch.tensor([1.0, 1, 0, 1])[:, None]).nan_to_num(0, float("inf"))},
        r"q_proj\.lora_A\.weight holds inf",
    ),
    "another dtype": ({f"{Q}A.weight": torch.zeros(4, 48, dtype=torch.float64)}, "is torch.float64; expected float32"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_peft(name: str, made: Made, base: Path, tmp_path: Path) -> None:
    changes, message = TENSORS[name]
    adapter = lora_files.save_peft(tmp_path / "peft", made.pairs)
    tensors = load_file(adapter / "adapter_model.safetensors") | changes
    save_file(
        {key: value for key, value in tensors.items() if value is not None}, adapter / "adapter_model.safetensors"
    )
    with pytest.raises(UserError, match=message):
        merge(base, adapter, tmp_path)


def test_files_of_peft(made: Made, base: Path, tmp_path: Path) -> None:
    adapter = lora_files.save_peft(tmp_path / "peft", made.pairs)
    # Older versions wrote a pickle.
    tensors = load_file(adapter / "adapter_model.safetensors")
    torch.save(tensors, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    merge(base, adapter, tmp_path, "--verify", "full")
    expect_close(tmp_path / "merged", made.expected)
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(UserError, match=r"has no adapter_model\.safetensors beside its adapter_config\.json"):
        toys.run(base, tmp_path / "no", "--lora-load", str(adapter), of="mg", to="hf")
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match=r"adapter_config\.json: not the configuration of an adapter"):
        toys.run(base, tmp_path / "no", "--lora-load", str(adapter), of="mg", to="hf")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["linear_proj"], r"_proj\.lora_.\.weight of .*peft would be left out"),
        (["linear_qkv", "linear_proj", "linear_fc2", "linear_fc3"], "has no adapter on all of linear_fc3"),
        (["linear_qkv", "linear_q", "linear_proj"], "are both adapters on self_attn.q_proj; keep one"),
    ],
)
def test_form_of_a_megatron_adapter(targets: list[str], message: str, made: Made, tmp_path: Path) -> None:
    source = lora_files.save_peft(tmp_path / "peft", made.pairs)
    with pytest.raises(UserError, match=message):
        toys.run(source, tmp_path / "mg", "--hf-cfg-dir", str(made.hf), "--lora-target-modules", *targets)
    with pytest.raises(UserError, match="an adapter cannot be shortened"):
        toys.run(
            source,
            tmp_path / "mg",
            "--hf-cfg-dir",
            str(made.hf),
            "--lora-target-modules",
            *FUSED,
            "--num-layers",
            "2",
        )
    assert not (tmp_path / "mg").exists()
