"""gpt-oss as it is published: experts in MXFP4 are converted as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_llm.errors import UserError
from tests.tasks.checkpoint import toys
from tests.tasks.checkpoint.test_convert import expect_same_hf, expect_same_mg

HIDDEN, FFN, EXPERTS = 64, 96, 8
SIZES = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def pair(hf_toy: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A toy in MXFP4, and the same in bfloat16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = json.loads((hf_toy("gpt-oss") / "config.json").read_text()) | SIZES
    config["layer_types"] = config["layer_types"][:2]
    folder = tmp_path_factory.mktemp("mxfp4")
    plain = toys.read_hf(toys.toy_of(folder / "plain", config))
    chance = torch.Generator().manual_seed(5)
    packed = {}
    for name in [name for name in plain if name.endswith("experts.down_proj") or name.endswith("gate_up_proj")]:
        experts, inputs, outputs = plain[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=chance)
        scales = torch.randint(110, 135, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=chance)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(plain, folder / "plain" / "model.safetensors")
    rest = {name: value for name, value in plain.items() if f"{name}_blocks" not in packed}
    quantised = toys.save_hf(
        folder / "mxfp4", config | {"quantization_config": {"quant_method": "mxfp4"}}, rest | packed
    )
    return quantised, folder / "plain"


def test_same_as_transformers(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for number, flags in enumerate(
        (
            "--target-tensor-parallel-size 2 --target-expert-parallel-size 2 --verify full",
            "--target-pipeline-parallel-size 2 --moe-grouped-gemm --transformer-impl transformer_engine",
        )
    ):
        for source, name in zip(pair, ("quantised", "plain"), strict=True):
            toys.run(source, tmp_path / f"{name}{number}", *flags.split())
        expect_same_mg(tmp_path / f"quantised{number}", tmp_path / f"plain{number}")
    back = tmp_path / "back"
    toys.run(tmp_path / "quantised0", back, "--hf-cfg-dir", str(pair[0]), of="mg", to="hf")
    expect_same_hf(pair[1], back)
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_parts_that_do_not_fit(pair: tuple[Path, Path], tmp_path: Path) -> None:
    weights, config = load_file(pair[0] / "model.safetensors"), json.loads((pair[0] / "config.json").read_text())
    name = "model.layers.1.mlp.experts.down_proj"
    for number, (changes, reason) in enumerate(
        (
            ({f"{name}_scales": None}, r"down_proj_blocks has no model\.layers\.1\.mlp\.experts\.down_proj_scales"),
            (
                {f"{name}_scales": torch.zeros(EXPERTS, HIDDEN, 2, dtype=torch.uint8)},
                r"has blocks \[8, 64, 3, 16\] and scales \[8, 64, 2\], but config\.json says \[8, 64, 3, 16\]",
            ),
        )
    ):
        changed = {key: value for key, value in (weights | changes).items() if value is not None}
        source = toys.save_hf(tmp_path / f"hf{number}", config, changed)
        with pytest.raises(UserError, match=reason):
            toys.run(source, tmp_path / "mg")
