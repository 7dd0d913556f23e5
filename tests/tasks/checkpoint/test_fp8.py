"""Block-wise fp8 weights are converted as if they had been dequantised first: by hand, and by transformers."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import fp8
from mindspeed_llm.tasks.checkpoint.boxes import Box, take
from mindspeed_llm.tasks.checkpoint.dry_run import lines
from mindspeed_llm.tasks.checkpoint.hf_reader import StoredHf
from mindspeed_llm.tasks.checkpoint.model import HfTensor
from mindspeed_llm.tasks.checkpoint.prepare import prepare
from mindspeed_llm.tasks.checkpoint.report import table
from tests.tasks.checkpoint import toys
from tests.tasks.checkpoint.hf_toy_table import EP2, GROUPED, MM, PP2, TE, TP2, VPP
from tests.tasks.checkpoint.test_convert import expect_same_hf, expect_same_mg

BLOCK = (16, 16)
DENSE = r"(_proj(_with_mqa)?|wk|wq_b|w[123]|head)\.weight$"
"""What is published in fp8: all matrices of layers but the router; and the output layer, to have that, too."""
MTP = "--mtp-num-layers 1"

# Arithmetic by hand: E4M3 has a sign, 4 bits of exponent with bias 7, 3 bits of mantissa, and no infinity


def value(byte: int) -> float:
    """The number that a byte is in float8_e4m3fn."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 0xF, byte & 0x7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    magnitude = mantissa / 8 * 2.0**-6 if not exponent else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


VALUES = np.array([value(byte) for byte in range(256)], dtype=np.float32)


def by_hand(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The fp32 values of an fp8 matrix, block by block."""
    found = VALUES[codes.view(torch.uint8).numpy()]
    for row in range(0, found.shape[0], block[0]):
        for column in range(0, found.shape[1], block[1]):
            found[row : row + block[0], column : column + block[1]] *= np.float32(
                scales[row // block[0], column // block[1]].item()
            )
    return torch.from_numpy(found)


def bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Finite fp32 values rounded to the nearest bfloat16, to the even one of two."""
    bits = values.view(torch.int32).long() & 0xFFFFFFFF
    half = 0x7FFF + (bits >> 16 & 1)
    return (bits + half >> 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)


def random_fp8(chance: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """All fp8 values but NaN; the small ones and the zeros of both signs, too."""
    codes = torch.randint(0, 254, shape, dtype=torch.uint8, generator=chance)
    return torch.where(codes >= 127, codes + 1, codes).view(torch.float8_e4m3fn)


def random_scales(chance: torch.Generator, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    """Numbers of all mantissas, and of about the sizes that scales have."""
    count = [-(-size // length) for size, length in zip(shape, block, strict=True)]
    return torch.exp2(-4 - 8 * torch.rand(count, generator=chance))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A model in fp8, and the same dequantised by hand."""

    fp8: Path
    bf16: Path
    fp32: Path


def pair(folder: Path, toy: Path, *, block: tuple[int, int] = BLOCK, which: str = DENSE) -> Pair:
    """The toy with fp8 in the place of its matrices, and three directories of it."""
    config = json.loads((toy / "config.json").read_text())
    quantised, exact = {}, {}
    for name, old in toys.read_hf(toy).items():
        if re.search(which, name):
            # Values follow from names, and the head of an MTP layer is that of the model.
            of = "lm_head.weight" if name.endswith(".head.weight") else name
            chance = torch.Generator().manual_seed(zlib.crc32(of.encode()))
            codes, scales = random_fp8(chance, old.shape), random_scales(chance, old.shape, block)
            quantised |= {name: codes, f"{name}_scale_inv": scales}
            exact[name] = by_hand(codes, scales, block)
        else:
            # As is: the bias of a router is in fp32.
            exact[name] = quantised[name] = old.float() if name.endswith("bias") else old.bfloat16()
    rounded = {
        name: bfloat16(values) if f"{name}_scale_inv" in quantised else values.clone() for name, values in exact.items()
    }
    says = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Pair(
        fp8=toys.save_hf(folder / "hf" / "fp8", config | {"quantization_config": says}, quantised),
        bf16=toys.save_hf(folder / "hf" / "bf16", config, rounded),
        fp32=toys.save_hf(folder / "hf" / "fp32", config, exact),
    )


# Whole conversions

SPLITS = [
    # (toy, block, flags)
    ("qwen3", BLOCK, f"{TP2} {PP2} --padded-vocab-size 600"),
    ("qwen3", (24, 10), f"{TE} {PP2} {VPP}"),
    ("deepseek3", BLOCK, f"{TP2} {PP2} {EP2} {MM} {MTP}"),
    ("deepseek3", (7, 16), f"{TP2} {EP2} {GROUPED} {MTP}"),
    ("deepseek3", (128, 128), f"{PP2} {EP2} {TE} {GROUPED}"),
    ("minimax_m2", BLOCK, f"{PP2} {EP2}"),
    ("minimax_m2", (10, 24), f"{PP2} {VPP} {GROUPED}"),
    ("glm5", BLOCK, f"{TP2} {PP2} {EP2} {GROUPED} {MM} {MTP}"),
]


def toy_of(name: str, folder: Path, hf_toy: Callable[[str], Path]) -> Path:
    return toys.toy(folder, name, vocab_size=509) if name in toys.CONFIGS else hf_toy(name)


@pytest.mark.parametrize(("name", "block", "flags"), SPLITS)
def test_equals_dequantising_first(
    name: str, block: tuple[int, int], flags: str, hf_toy: Callable[[str], Path], tmp_path: Path
) -> None:
    """To the bit in all three dtypes, and back; every part of the output is verified on the way, too."""
    models = pair(tmp_path, toy_of(name, tmp_path / "toy", hf_toy), block=block)
    for dtype, plain in (("", models.bf16), ("fp32", models.fp32), ("fp16", models.fp32)):
        wanted = [*flags.split(), *(("--params-dtype", dtype) if dtype else ())]
        toys.run(plain, tmp_path / f"plain{dtype}", *wanted)
        toys.run(models.fp8, tmp_path / f"fp8{dtype}", *wanted, "--verify", "full")
        expect_same_mg(tmp_path / f"plain{dtype}", tmp_path / f"fp8{dtype}")
    if MTP in flags or name not in ("deepseek3", "glm5"):
        back = tmp_path / "back"
        toys.run(tmp_path / "fp8", back, "--hf-cfg-dir", str(models.fp8), of="mg", to="hf")
        expect_same_hf(models.bf16, back)
        assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_round_once() -> None:
    """bf16 and fp32 results differ in more than their width, or the test above would say nothing of rounding."""
    chance = torch.Generator().manual_seed(3)
    codes = random_fp8(chance, (64, 64))
    exact = by_hand(codes, random_scales(chance, (64, 64), BLOCK), BLOCK)
    assert torch.equal(bfloat16(exact), exact.bfloat16())
    assert (bfloat16(exact).float() != exact).float().mean() > 0.9
    assert (exact.half() != bfloat16(exact).half()).float().mean() > 0.5


# Boxes of one tensor


def stored(values: torch.Tensor) -> StoredHf:
    """A tensor as a reader gives it."""
    return StoredHf(file=Path("x.safetensors"), dtype=values.dtype, shape=tuple(values.shape), view=lambda: values)


def matrix(view: tuple[int, ...], shape: tuple[int, int], block: tuple[int, int]) -> tuple[fp8.Fp8Source, torch.Tensor]:
    """A source with one matrix, and its values by hand in the view."""
    chance = torch.Generator().manual_seed(7)
    codes, scales = random_fp8(chance, shape), random_scales(chance, shape, block)
    source = fp8.Fp8Source(
        {"w": stored(codes), "w_scale_inv": stored(scales)}, {"w": HfTensor(name="w", shape=shape, view=view)}, block
    )
    return source, by_hand(codes, scales, block).view(view)


@pytest.mark.parametrize(
    ("view", "shape", "block"),
    [
        ((200, 130), (200, 130), (128, 128)),
        ((4, 50, 130), (200, 130), (128, 128)),
        ((2, 2, 50, 130), (200, 130), (30, 128)),
        ((200, 13, 10), (200, 130), (128, 7)),
        ((1, 130), (1, 130), (128, 128)),
        ((200, 1), (200, 1), (3, 128)),
        ((5, 40, 13, 10), (200, 130), (1, 128)),
        ((700, 1000), (700, 1000), (128, 128)),
    ],
)
def test_any_box(view: tuple[int, ...], shape: tuple[int, int], block: tuple[int, int]) -> None:
    """A weight is the same whatever box it is read with."""
    source, expected = matrix(view, shape, block)
    chance = random.Random(2)
    boxes: list[Box] = [tuple((0, size) for size in view)]
    for _ in range(40):
        starts = [chance.randrange(size) for size in view]
        boxes.append(tuple((start, chance.randint(start + 1, size)) for start, size in zip(starts, view, strict=True)))
    for box in boxes:
        found = torch.full(view, float("nan"))
        count = 0
        for part, values in source.read("w", box):
            assert values.dtype == torch.float32
            take(found, part).copy_(values)
            count += values.numel()
        assert torch.equal(take(found, box), take(expected, box))
        assert count == take(expected, box).numel()
    assert source.dtype("w") == torch.bfloat16


def test_all_values_and_kinds_of_scales() -> None:
    """Every fp8 value, NaN too; scales may come in bf16 (Qwen3), in fp16, and as powers of two."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    exponents = torch.tensor([[100, 120], [127, 140]], dtype=torch.uint8)
    given = torch.tensor([[0.3, 1.7], [1e-3, 900.0]])
    for scales, meant in (
        (given, given),
        (given.bfloat16(), given.bfloat16().float()),
        (given.half(), given.half().float()),
        (exponents.view(torch.float8_e8m0fnu), torch.exp2(exponents.float() - 127)),
    ):
        source = fp8.Fp8Source(
            {"w": stored(codes), "w_scale_inv": stored(scales)},
            {"w": HfTensor(name="w", shape=(16, 16), view=(16, 16))},
            (8, 8),
        )
        [(_, found)] = source.read("w", ((0, 16), (0, 16)))
        expected = by_hand(codes, meant, (8, 8))
        assert torch.equal(found.isnan(), expected.isnan()) and int(found.isnan().sum()) == 2
        assert torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5))
        assert torch.equal(found.signbit() | found.isnan(), expected.signbit() | expected.isnan())


def test_no_more_at_once_than_fits_a_cache() -> None:
    source, _ = matrix((3000, 500), (3000, 500), (128, 128))
    parts = [values for _, values in source.read("w", ((0, 3000), (0, 500)))]
    assert len(parts) > 5 and max(part.numel() for part in parts) <= 2**18


# As transformers dequantises

OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    # It wants dimensions that blocks divide.
    "qwen3": {"intermediate_size": 96},
    "deepseek3": {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "num_nextn_predict_layers": 0,
        "num_key_value_heads": 6,
        "n_group": 4,
        "topk_group": 2,
    },
}


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_same_as_transformers(name: str, tmp_path: Path) -> None:
    """A model that transformers loads from fp8 has the weights that come back from a Megatron checkpoint of it."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    toy = toys.toy(tmp_path / "toy", name, **OF_TRANSFORMERS[name])
    models = pair(tmp_path, toy, which=DENSE.replace("|head", ""))
    config = json.loads((models.fp8 / "config.json").read_text())
    (models.fp8 / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    toys.run(models.fp8, tmp_path / "mg", *f"{TP2} {PP2}".split())
    toys.run(tmp_path / "mg", tmp_path / "back", "--hf-cfg-dir", str(models.fp8), of="mg", to="hf")
    quantisation = FineGrainedFP8Config(weight_block_size=BLOCK, dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        models.fp8, dtype=torch.bfloat16, quantization_config=quantisation
    ).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.bfloat16).state_dict()
    assert sorted(theirs) == sorted(ours)
    for key, values in ours.items():
        assert values.dtype == theirs[key].dtype and torch.equal(values, theirs[key]), key


# What is said about it


def test_report_and_dry_run(tmp_path: Path) -> None:
    models = pair(tmp_path, toys.toy(tmp_path / "toy", "qwen3", vocab_size=500))
    done = toys.run(models.fp8, tmp_path / "mg", *TP2.split())
    source = done.report["source"]
    # 4 layers of 7 matrices and 4 norms; output layer, embedding and final norm.
    assert (source["tensors"], source["taken"], source["dropped"]) == (47, 47, {})
    assert source["dequantised"] == {
        "tensors": 29,
        "stored_as": "float8_e4m3fn in blocks [16, 16]",
        "scale_tensors": {"*_scale_inv": 29},
    }
    assert len(toys.read_hf(models.fp8)) == 47 + 29
    assert done.report["output"]["dtypes"] == {"bfloat16": 70}
    shown = table(done.report, tmp_path / "mg").splitlines()
    assert shown[1] == "read       47 tensors, 47 taken, 0 dropped"
    assert shown[2] == ("quantised  29 of them, float8_e4m3fn in blocks [16, 16], dequantised with 29 *_scale_inv")
    plan = prepare(toys.request(models.fp8, tmp_path / "other", *TP2.split()))
    found = [" ".join(line.split()) for line in lines(plan.plan, plan.loaded.source, plan.model.hf_tensors())]
    assert (
        "model/decoder.layers.{0-3}.mlp.linear_fc2.weight [48, 44] bfloat16 <- model.layers.{0-3}.mlp.down_proj.weight "
        "[48, 88] float8_e4m3fn with scales [3, 6] part [:, 0:44] of [48, 88]"
    ) in found
    assert not [line for line in found if "_scale_inv" in line]
    assert "dequantised" not in toys.run(models.bf16, tmp_path / "plain").report["source"]


def test_config_of_the_output(tmp_path: Path) -> None:
    """It says nothing of fp8, wherever its config.json comes from; and no file beside it does."""
    models = pair(tmp_path, toys.toy(tmp_path / "toy", "qwen3"))
    config = json.loads((models.fp8 / "config.json").read_text())
    (models.fp8 / "config.json").write_text(json.dumps(config | {"torch_dtype": "float8_e4m3fn"}))
    for name in ("hf_quant_config.json", "tokenizer_config.json"):
        (models.fp8 / name).write_text("{}")
    toys.run(models.fp8, tmp_path / "mg")
    content = torch.load(tmp_path / "mg" / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    assert not hasattr(content["args"], "quantization_config")
    for number, flags in enumerate((["--hf-cfg-dir", str(models.fp8)], [])):
        back = tmp_path / f"back{number}"
        toys.run(tmp_path / "mg", back, *flags, of="mg", to="hf")
        written = json.loads((back / "config.json").read_text())
        assert "quantization_config" not in written and written["torch_dtype" if flags else "dtype"] == "bfloat16"
        assert (back / "tokenizer_config.json").exists() == bool(flags)
        assert not (back / "hf_quant_config.json").exists()


def test_model_that_is_part_of_another(tmp_path: Path) -> None:
    """Scales follow the names of their tensors; what config.json says of quantisation may stand in either part."""
    models = pair(tmp_path, toys.toy(tmp_path / "toy", "qwen3"))
    config = json.loads((models.fp8 / "config.json").read_text())
    quantisation = config.pop("quantization_config")
    tensors = {
        re.sub(r"^model\.", "model.language_model.", name): each for name, each in toys.read_hf(models.fp8).items()
    }
    toys.run(models.bf16, tmp_path / "plain")
    for number, whole in enumerate(
        (
            {"text_config": config, "quantization_config": quantisation},
            {"text_config": config | {"quantization_config": quantisation}},
        )
    ):
        toys.run(toys.save_hf(tmp_path / f"hf{number}", whole, tensors), tmp_path / f"mg{number}")
        expect_same_mg(tmp_path / "plain", tmp_path / f"mg{number}")


def test_layers_that_are_left_out(tmp_path: Path) -> None:
    """Their tensors are named as dropped, their scales belong to them."""
    models = pair(tmp_path, toys.toy(tmp_path / "toy", "deepseek3"))
    flags = ["--num-layers", "2"]
    toys.run(models.bf16, tmp_path / "plain", *flags)
    dropped = toys.run(models.fp8, tmp_path / "mg", *flags).plan.dropped
    expect_same_mg(tmp_path / "plain", tmp_path / "mg")
    assert dropped["model.layers.3.self_attn.o_proj.weight"] == "layer 3 is left out"
    assert dropped["model.layers.4.eh_proj.weight"] == "MTP layers beyond --mtp-num-layers are left out"
    assert not [name for name in dropped if name.endswith("_scale_inv")]


# Faults

Change = Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]


def _numbers(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Change:
    """Other numbers of blocks; `change` is given them and how many blocks the dimension has."""

    def of(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def numbers(sizes, part, block):
            return change(original(sizes, part, block), -(-int(np.prod(sizes)) // block))

        return numbers

    return of


def _product(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Change:
    return lambda original: lambda codes, factors: change(original(codes, factors), factors.view(codes.shape))


def _from_zero(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda sizes, part, block: original(sizes, tuple((0, stop - start) for start, stop in part), block)


MUTANTS: Mapping[str, tuple[str, Change]] = {
    "the scale of the next block": (
        "_block_numbers",
        _numbers(lambda numbers, count: (numbers + 1).clamp(max=count - 1)),
    ),
    "the blocks at the end belong to those before": (
        "_block_numbers",
        _numbers(lambda numbers, count: numbers.clamp(max=max(count - 2, 0))),
    ),
    "division in the place of multiplication": ("_product", _product(lambda values, scale: values / scale / scale)),
    "no scales": ("_product", _product(lambda values, scale: values / scale)),
    "rounded to bf16 before": ("_product", _product(lambda values, _: values.bfloat16())),
    "rounded to fp16 before": ("_product", _product(lambda values, _: values.half())),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, Path]:
    """A model in fp8, and what must become of it in fp32."""
    folder = tmp_path_factory.mktemp("mutants")
    models = pair(folder, toys.toy(folder / "toy", "deepseek3"))
    toys.run(models.fp32, folder / "mg", *MUTANT_FLAGS)
    return models, folder / "mg"


MUTANT_FLAGS = f"{TP2} {EP2} {MM} --params-dtype fp32".split()


@pytest.mark.parametrize("name", MUTANTS)
def test_faults_show(name: str, converted: tuple[Pair, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the values; verification, which takes the source's word for them, sees none of these."""
    attribute, change = MUTANTS[name]
    monkeypatch.setattr(fp8, attribute, change(getattr(fp8, attribute)))
    expect_fault(converted, tmp_path)


def test_transposed_scales_show(converted: tuple[Pair, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = fp8._scales_of

    def turned(tensors, name):
        scales = original(tensors, name)
        values = scales.view().t().contiguous().view(scales.shape)
        return StoredHf(file=scales.file, dtype=scales.dtype, shape=scales.shape, view=lambda: values)

    monkeypatch.setattr(fp8, "_scales_of", turned)
    expect_fault(converted, tmp_path)


def expect_fault(converted: tuple[Pair, Path], folder: Path) -> None:
    toys.run(converted[0].fp8, folder / "mg", *MUTANT_FLAGS)
    with pytest.raises(AssertionError, match="linear"):
        expect_same_mg(converted[1], folder / "mg")


def test_blocks_counted_from_where_a_box_begins(
    converted: tuple[Pair, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verification reads other boxes, so it sees a value that depends on the box."""
    monkeypatch.setattr(fp8, "_block_numbers", _from_zero(fp8._block_numbers))
    with pytest.raises(UserError, match="verification failed, nothing was published"):
        toys.run(converted[0].fp8, tmp_path / "mg", *MUTANT_FLAGS)
