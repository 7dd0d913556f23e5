"""Quantised weights that cannot be read are refused, by name and before anything is written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_llm.errors import UserError
from tests.tasks.checkpoint import toys
from tests.tasks.checkpoint.test_convert import expect_same_mg
from tests.tasks.checkpoint.test_fp8 import BLOCK, Pair, pair

W = "model.layers.2.mlp.down_proj.weight"
"""[48, 88], with 3 x 6 scales."""
S = f"{W}_scale_inv"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A small model in fp8."""
    folder = tmp_path_factory.mktemp("refused")
    return pair(folder, toys.toy(folder / "toy", "qwen3"))


def changed(
    folder: Path, models: Pair, tensors: Mapping[str, torch.Tensor | None], config: Mapping[str, Any] | None = None
) -> Path:
    """The model with other tensors (None: without it), the scales of `W` in the second of two files."""
    says = json.loads((models.fp8 / "config.json").read_text()) | dict(config or {})
    every = {name: each for name, each in (toys.read_hf(models.fp8) | dict(tensors)).items() if each is not None}
    second = {name for name in every if name.startswith(S)}
    folder.mkdir()
    files = {"model-00001-of-00002.safetensors": every.keys() - second, "model-00002-of-00002.safetensors": second}
    for file, names in files.items():
        save_file({name: every[name].clone() for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(says))
    return folder


def scales(**places: float) -> torch.Tensor:
    """Scales with other numbers at some places, which are given as `at_2_5`."""
    values = torch.full((3, 6), 0.25)
    for place, number in places.items():
        row, column = (int(each) for each in place.removeprefix("at_").split("_"))
        values[row, column] = number
    return values


FIRST, SECOND = (rf"model-0000{number}-of-00002\.safetensors: " for number in (1, 2))
TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no scales": (
        {S: None},
        FIRST + r"\S+down_proj\.weight is float8_e4m3fn, but \S+down_proj\.weight_scale_inv is not there; expected "
        "scales by block",
    ),
    "scales per channel": (
        {S: None, f"{W}_scale": torch.ones(48, 1)},
        FIRST + r"\S+down_proj\.weight is float8_e4m3fn with \S+down_proj\.weight_scale \[48, 1\] beside it, scales "
        r"per tensor or per channel, .*; expected \S+down_proj\.weight_scale_inv, scales by block",
    ),
    "a scale per tensor": (
        {S: None, f"{W}_scale": torch.ones(())},
        r"with \S+down_proj\.weight_scale \[\] beside it, scales per tensor",
    ),
    "a scale per tensor by the other name": (
        {S: torch.ones(())},
        SECOND + r"\S+weight_scale_inv is float32 \[\]; expected \[3, 6\] of float32",
    ),
    "scales without a tensor": (
        {f"{S}.more_scale_inv": scales()},
        SECOND + r"\S+\.more_scale_inv has no \S+weight_scale_inv\.more beside it",
    ),
    "scales of a tensor that was dequantised": (
        {W: torch.zeros(48, 88, dtype=torch.bfloat16)},
        FIRST + r"\S+down_proj\.weight is bfloat16, but has scales beside it \(\S+_scale_inv in model-00002-of-00002\."
        r"safetensors\); expected float8_e4m3fn",
    ),
    "scales of another block size": (
        {S: torch.ones(2, 3)},
        SECOND + r"\S+weight_scale_inv is float32 \[2, 3\]; expected \[3, 6\] of float32, one for each block "
        r"\[16, 16\] of \S+down_proj\.weight \[48, 88\]\. Check quantization_config\.weight_block_size",
    ),
    "transposed scales": ({S: torch.ones(6, 3)}, r"is float32 \[6, 3\]; expected \[3, 6\]"),
    "edge blocks without scales": ({S: torch.ones(3, 5)}, r"is float32 \[3, 5\]; expected \[3, 6\]"),
    "scales in bytes": ({S: torch.ones(3, 6, dtype=torch.uint8)}, r"is uint8 \[3, 6\]; expected \[3, 6\] of float32"),
    "scales in fp8": (
        {S: torch.ones(3, 6).to(torch.float8_e4m3fn)},
        # It looks like one more weight in fp8, but stands where scales must.
        r"weight_scale_inv is float8_e4m3fn \[3, 6\]; expected \[3, 6\] of float32",
    ),
    "the other fp8": (
        {W: torch.zeros(48, 88, dtype=torch.float8_e5m2)},
        FIRST + r"\S+down_proj\.weight is float8_e5m2; of fp8 only float8_e4m3fn",
    ),
    "a vector in fp8": (
        {
            "model.norm.weight": torch.zeros(48).to(torch.float8_e4m3fn),
            "model.norm.weight_scale_inv": torch.ones(3),
        },
        FIRST + r"model\.norm\.weight is float8_e4m3fn \[48\]; expected a matrix",
    ),
    "a scale that is no number": ({S: scales(at_1_4=float("nan"))}, SECOND + r"\S+ holds nan at \[1, 4\]"),
    "an infinite scale": ({S: scales(at_2_5=float("inf"))}, SECOND + r"\S+ holds inf at \[2, 5\]"),
    "a negative scale": ({S: scales(at_0_0=-0.5)}, SECOND + r"\S+ holds -0\.5 at \[0, 0\]"),
    "a scale of zero": ({S: scales(at_2_5=0.0)}, SECOND + r"\S+ holds 0\.0 at \[2, 5\], for a block that is not all"),
    "scales of zeros, as a hole in a file has": ({S: torch.zeros(3, 6)}, r"holds 0\.0 at \[0, 0\]"),
    "no number among powers of two": (
        {S: torch.full((3, 6), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)},
        r"holds nan at \[0, 0\]",
    ),
    "a matrix of another shape": (
        {W: torch.zeros(48, 80, dtype=torch.uint8).view(torch.float8_e4m3fn)},
        r"down_proj\.weight has shape \[48, 80\], but config\.json says \[48, 88\]",
    ),
}


def expect_refusal(source: Path, message: str, *flags: str) -> None:
    before = sorted(source.parent.iterdir())
    for more in ([], ["--params-dtype", "fp32"]):
        with pytest.raises(UserError, match=message) as caught:
            toys.run(source, source.parent / "mg", *flags, *more)
        assert "\n" not in str(caught.value)
    assert sorted(source.parent.iterdir()) == before


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str, models: Pair, tmp_path: Path) -> None:
    tensors, message = TENSORS[name]
    expect_refusal(changed(tmp_path / "hf", models, tensors), message)


def test_the_unchanged_model_is_not_refused(models: Pair, tmp_path: Path) -> None:
    """Or the cases above would say nothing."""
    toys.run(changed(tmp_path / "hf", models, {}), tmp_path / "mg")
    toys.run(models.bf16, tmp_path / "plain")
    expect_same_mg(tmp_path / "plain", tmp_path / "mg")


def test_a_block_of_zeros_may_have_a_scale_of_zero(models: Pair, tmp_path: Path) -> None:
    codes = torch.full((48, 88), 0x38, dtype=torch.uint8)
    codes[32:, 80:] = 0x80  # negative zeros
    values = {W: codes.view(torch.float8_e4m3fn), S: scales(at_2_5=0.0)}
    toys.run(changed(tmp_path / "hf", models, values), tmp_path / "mg")
    [tensors] = toys.read_mg(tmp_path / "mg").values()
    expected = torch.full((48, 88), 0.25)
    expected[32:, 80:] = 0
    assert torch.equal(tensors["decoder.layers.2.mlp.linear_fc2.weight"].float(), expected)


QUANTISED = "weights that the model was quantised from"
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        method: (
            {"quantization_config": {"quant_method": method, "bits": 4}},
            rf"config\.json: quantization_config\.quant_method is '{method}'; of quantised weights, only those of fp8 "
            rf"and mxfp4 .*{QUANTISED}",
        )
        for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors", "modelopt", "fbgemm_fp8")
    },
    "without a method": ({"quantization_config": {"load_in_8bit": True}}, r"quantization_config\.quant_method is None"),
    "no mapping": ({"quantization_config": "int4"}, r"quantization_config\.quant_method is None"),
    "under the other key": (
        {"quantization_config": None, "compression_config": {"quant_method": "compressed-tensors"}},
        r"compression_config\.quant_method is 'compressed-tensors'; .*remove compression_config",
    ),
    **{
        f"blocks of {block}": (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}},
            rf"config\.json: quantization_config\.weight_block_size is {re.escape(str(block))}; expected the rows and "
            "columns",
        )
        for block in (None, 128, [128], [128, 0], [128, 128.0], [True, 128])
    },
    # Blocks of 128 x 128 are meant, which are larger than most matrices here.
    "blocks not named": ({"quantization_config": {"quant_method": "fp8"}}, r"one for each block \[128, 128\] of"),
    "nothing said": ({"quantization_config": None}, r"one for each block \[128, 128\] of"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name: str, models: Pair, tmp_path: Path) -> None:
    config, message = CONFIGS[name]
    expect_refusal(changed(tmp_path / "hf", models, {}, config), message)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_packed_weights(method: str, models: Pair, tmp_path: Path) -> None:
    """The method is what is named, not the first tensor that is not where it is looked for."""
    packed = {
        "gptq": {W: None, W.replace("weight", "qweight"): torch.zeros(11, 48, dtype=torch.int32)},
        "awq": {W: None, W.replace("weight", "qweight"): torch.zeros(88, 6, dtype=torch.int32)},
        "bitsandbytes": {W: torch.zeros(2112, 1, dtype=torch.uint8), f"{W}.absmax": torch.zeros(66)},
    }[method]
    source = changed(tmp_path / "hf", models, packed, {"quantization_config": {"quant_method": method}})
    expect_refusal(source, f"quant_method is '{method}'")


def test_blocks_of_128_are_meant_where_nothing_is_said(tmp_path: Path) -> None:
    sizes = {"hidden_size": 144, "intermediate_size": 300, "num_hidden_layers": 1}
    models = pair(tmp_path, toys.toy(tmp_path / "toy", "qwen3", **sizes), block=(128, 128))
    plain = json.loads((models.bf16 / "config.json").read_text())
    toys.run(models.bf16, tmp_path / "plain")
    for number, says in enumerate(({}, {"quantization_config": {"quant_method": "fp8"}})):
        (models.fp8 / "config.json").write_text(json.dumps(plain | says))
        toys.run(models.fp8, tmp_path / f"mg{number}")
        expect_same_mg(tmp_path / "plain", tmp_path / f"mg{number}")


def test_weights_that_were_dequantised_and_keep_their_config(models: Pair, tmp_path: Path) -> None:
    config = json.loads((models.fp8 / "config.json").read_text())
    source = toys.save_hf(tmp_path / "hf", config, toys.read_hf(models.bf16))
    done = toys.run(source, tmp_path / "mg")
    toys.run(models.bf16, tmp_path / "plain")
    expect_same_mg(tmp_path / "plain", tmp_path / "mg")
    assert "dequantised" not in done.report["source"]


def test_the_config_beside_the_weights_says_how_they_are_stored(models: Pair, tmp_path: Path) -> None:
    """--hf-cfg-dir does where there is none."""
    plain = json.loads((models.bf16 / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for number, (beside, given) in enumerate(((True, None), (False, {"weight_block_size": list(BLOCK)}))):
        source = changed(tmp_path / f"hf{number}", models, {})
        if not beside:
            (source / "config.json").unlink()
        says = {} if given is None else {"quantization_config": {"quant_method": "fp8"} | given}
        (other / "config.json").write_text(json.dumps(plain | says))
        toys.run(source, tmp_path / f"mg{number}", "--hf-cfg-dir", str(other))
    expect_same_mg(tmp_path / "mg0", tmp_path / "mg1")
    (other / "config.json").write_text(json.dumps(plain | {"quantization_config": {"quant_method": "gptq"}}))
    toys.run(models.bf16, tmp_path / "mg2", "--hf-cfg-dir", str(other))
    expect_same_mg(tmp_path / "mg0", tmp_path / "mg2")
