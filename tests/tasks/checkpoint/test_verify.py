"""The verification sees faults in moving values, before anything is published; the reference files see those in rules.

Both directions follow the same rules, so a rule that is wrong, but consistently so, gives an output that converts back
bit for bit. What shows such a fault is upstream's own output, in `test_reference`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import convert, fill, load, mg_writer, prepare, rules, verify
from mindspeed_llm.tasks.checkpoint.boxes import take
from mindspeed_llm.tasks.checkpoint.plan import Target
from tests.tasks.checkpoint import test_reference, toys
from tests.tasks.checkpoint.test_layout import EP, PP, TP

FLAGS = [TP, "2", PP, "2", EP, "2", "--moe-grouped-gemm", "--make-vocab-size-divisible-by", "300"]


def source_of(folder: Path) -> Path:
    return toys.toy(folder / "hf", "qwen3-moe")


# Faults in moving values: what is patched, and how


def _changed(word: str, change: Callable[[Target, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """Put the slabs of tensors with `word` in their key together in another way."""

    def fault(original):
        def assemble(target, slab, source):
            values = original(target, slab, source)
            return change(target, values.clone()).contiguous() if word in target.key else values

        return assemble

    return fault


def _swapped_halves(axis: int) -> Callable[[Target, torch.Tensor], torch.Tensor]:
    return lambda _, values: values.roll(values.shape[axis] // 2, axis)


def _filled_padding(target: Target, values: torch.Tensor) -> torch.Tensor:
    # Toys are small: a slab is a whole tensor.
    assert tuple(values.shape) == target.view
    if target.padding is not None:
        take(values, target.padding).fill_(1)
    return values


def _lost(word: str) -> Callable[..., Any]:
    def fault(original):
        def write_slab(descriptor, position, target, slab, source):
            return (target.nbytes, 0) if word in target.key else original(descriptor, position, target, slab, source)

        return write_slab

    return fault


def _shifted(word: str) -> Callable[..., Any]:
    def fault(original):
        def write_slab(descriptor, position, target, slab, source):
            off = target.dtype.itemsize if word in target.key else 0
            return original(descriptor, position + off, target, slab, source)

        return write_slab

    return fault


def _saying(**arguments: Any) -> Callable[..., Any]:
    return lambda original: lambda *args: original(*args) | arguments


def _wrong_name(original):
    return lambda name: original(name.replace("q_layernorm", "query_layernorm"))


def _forgotten(original):
    def plan_mg(*args, **kwargs):
        plan = original(*args, **kwargs)
        plan.taken.remove("model.layers.2.self_attn.v_proj.weight")
        return plan

    return plan_mg


FAULTS = {
    # fault: (owner, attribute, change, what the message names)
    "query, key and value of a group in another order": (
        (fill, "assemble", _changed("linear_qkv", _swapped_halves(1))),
        "mp_rank_0.*linear_qkv",
    ),
    "gate and up change places": (
        (fill, "assemble", _changed("experts.weight1", _swapped_halves(2))),
        "experts.weight1",
    ),
    "experts change places": ((fill, "assemble", _changed("experts.weight2", _swapped_halves(0))), "experts.weight2"),
    "padded rows are not zero": (
        (fill, "assemble", _changed("word_embeddings", _filled_padding)),
        "mp_rank_01.*word_embeddings.weight is not zero where it is padded",
    ),
    "a tensor is not written": ((fill, "write_slab", _lost("layers.1.self_attention.linear_proj")), "linear_proj"),
    "a tensor is written one element too late": (
        (fill, "write_slab", _shifted("layers.1.input_layernorm")),
        "layers.1.input_layernorm",
    ),
    "a tensor has another name": ((mg_writer, "_split", _wrong_name), "layernorm.weight is missing, expected bfloat16"),
    "the arguments say another split than the files have": (
        (mg_writer, "topology_arguments", _saying(tensor_model_parallel_size=1)),
        "cannot be read back by what it says about itself",
    ),
    "a source tensor is lost sight of": (
        (prepare, "plan_mg", _forgotten),
        "v_proj.weight was neither taken nor named as dropped",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_in_moving_values(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default verification finds them, names the tensor, and nothing is published."""
    (owner, attribute, fault), message = FAULTS[name]
    source = source_of(tmp_path)
    monkeypatch.setattr(owner, attribute, fault(getattr(owner, attribute)))
    with pytest.raises(UserError, match=f"verification failed, nothing was published: .*{message}"):
        toys.run(source, tmp_path / "mg", *FLAGS)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# Faults in rules: those of `test_reference`, on toys of this folder: does a conversion see them, too

SEEN_BY_ACCOUNTING = {
    # Rows that no rank has.
    "every rank has the first rows of the vocabulary": "the rules take 12288 of 24576 elements",
}
STAND_INS = {
    "llama2": "qwen3",
    "phi3.5": "qwen25",
    "qwen2-moe": "qwen3-moe",
    "gemma2": "qwen3",
    "deepseek2-lite": "deepseek3",
}


@pytest.mark.parametrize("name", test_reference.MUTANTS)
def test_faults_in_rules(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference files show all of them; the conversion itself those that lose something, and no others."""
    owner, attribute, fault, family = test_reference.MUTANTS[name]
    source = toys.toy(tmp_path / "hf", STAND_INS.get(family, family))
    monkeypatch.setattr(owner, attribute, fault(getattr(owner, attribute)))
    flags = [TP, "2", *(["--moe-grouped-gemm"] if "stacked" in name else [])]
    if name in SEEN_BY_ACCOUNTING:
        with pytest.raises(AssertionError, match=SEEN_BY_ACCOUNTING[name]):
            toys.run(source, tmp_path / "mg", *flags)
        assert not (tmp_path / "mg").exists()
    else:
        toys.run(source, tmp_path / "mg", *flags)


def test_padded_rows_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that takes padding for rows of the vocabulary has no source for them, and one that does not trim them on
    the way back is seen by the round trip.
    """
    source = toys.toy(tmp_path / "hf", "qwen3", vocab_size=500)
    toys.run(source, tmp_path / "mg", TP, "2", "--padded-vocab-size", "600")
    original = load.from_megatron
    monkeypatch.setattr(load, "from_megatron", lambda *args: original(*args) | {"vocab_size": 600})
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    with pytest.raises(AssertionError, match="600"):
        assert toys.read_hf(tmp_path / "back")["lm_head.weight"].shape == toys.read_hf(source)["lm_head.weight"].shape

    monkeypatch.setattr(rules.Vocabulary, "place", _all_rows_are_real(rules.Vocabulary.place))
    with pytest.raises(AssertionError, match="a part lies outside"):
        toys.run(source, tmp_path / "again", TP, "2", "--padded-vocab-size", "600")


def _all_rows_are_real(original):
    def place(self, parts, share):
        [part] = parts
        box = ((0, share.padded_vocab_size), part.box[1])
        return original(self, [replace(part, box=box)], share)

    return place


@pytest.mark.parametrize("to", ["mg", "hf"])
@pytest.mark.parametrize("seed", range(3))
def test_full_verification_sees_one_bit(to: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is, also where a sample does not look."""
    source, of = toys.toy(tmp_path / "hf", "qwen3", vocab_size=4000), "hf"
    if to == "hf":
        toys.run(source, tmp_path / "from", TP, "2")
        source, of = tmp_path / "from", "mg"
    chance = random.Random(seed)
    original, hit = convert.fill, []

    def flipped(files, *args, **kwargs):
        files = list(files)
        checksums = original(iter(files), *args, **kwargs)
        file = chance.choice(files)
        target = chance.choice(file.targets)
        place = file.offsets[target.key] + chance.randrange(target.nbytes)
        with file.path.open("r+b") as stream:
            stream.seek(place)
            [byte] = stream.read(1)
            stream.seek(place)
            stream.write(bytes([byte ^ 1 << chance.randrange(8)]))
        hit.append(target.key)
        return checksums

    monkeypatch.setattr(convert, "fill", flipped)
    with pytest.raises(UserError, match="verification failed") as error:
        toys.run(source, tmp_path / "out", "--verify", "full", of=of, to=to)
    assert hit[0] in str(error.value)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.partial"))


def test_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample has some tensors of each kind, full has all of them, none looks at nothing."""
    source = source_of(tmp_path)
    found = {
        mode: toys.run(source, tmp_path / mode, *FLAGS, "--verify", mode).report for mode in ("full", "sample", "none")
    }
    total = found["full"]["source"]["taken"]
    full, sample, none = (found[mode]["verification"] for mode in ("full", "sample", "none"))
    assert full["source_tensors_converted_back"] == total
    # Every tensor of the output once, every one of the source once.
    hf_bytes = sum(value.nbytes for value in toys.read_hf(source).values())
    assert full["bytes_compared"] == found["full"]["output"]["bytes"] + hf_bytes
    assert sample["output_tensors"] == found["full"]["output"]["tensors"]
    kinds = {verify.kind(name) for name in toys.read_hf(source)}
    assert len(kinds) <= sample["source_tensors_converted_back"] <= 2 * len(kinds) < total
    assert none == {"mode": "none"}


def test_holes_are_compared_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that were never written, in a tensor that is too large for a sample to look at all of it."""
    source = toys.toy(tmp_path / "hf", "qwen3", vocab_size=40000)
    monkeypatch.setattr(verify, "_look", lambda target, chance: [])
    monkeypatch.setattr(verify, "_choose", lambda names, chance: [])
    toys.run(source, tmp_path / "whole")
    monkeypatch.setattr(fill, "write_slab", _lost("output_layer")(fill.write_slab))
    with pytest.raises(UserError, match=r"output_layer\.weight does not hold what the source has for it at \[0:"):
        toys.run(source, tmp_path / "mg")


def test_values_that_are_no_numbers_are_compared_by_their_bits(tmp_path: Path) -> None:
    weights = {"nan": float("nan"), "minus_zero": -0.0, "infinite": float("inf")}
    source = toys.toy(tmp_path / "hf", "qwen3")
    tensors = {name: value.clone() for name, value in toys.read_hf(source).items()}
    for number, value in enumerate(weights.values()):
        tensors[f"model.layers.{number}.mlp.down_proj.weight"].fill_(value)
    save_file(tensors, source / "model.safetensors")
    toys.run(source, tmp_path / "mg", TP, "2", "--verify", "full")
    toys.run(tmp_path / "mg", tmp_path / "back", "--verify", "full", of="mg", to="hf")
    for name, value in toys.read_hf(tmp_path / "back").items():
        assert torch.equal(value.view(torch.int16), tensors[name].view(torch.int16)), name
