"""Hugging Face directories that contradict themselves are refused where others would read another model in them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.arguments import from_hf_config
from mindspeed_llm.tasks.checkpoint.families import by_id
from mindspeed_llm.tasks.checkpoint.hf_reader import open_hf, open_weight_file
from tests.tasks.checkpoint import toys
from tests.tasks.checkpoint.test_odd_inputs import sharded

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def refused(source: Path, tmp_path: Path, message: str, *flags: str) -> None:
    """Expect that a conversion fails with this message and leaves nothing behind."""
    with pytest.raises(UserError, match=message):
        toys.run(source, tmp_path / "mg", *flags)
    assert not (tmp_path / "mg").exists()


# An output layer beside a tied embedding


def tied(folder: Path, head: str) -> Path:
    """A tied toy of Qwen 3 with an output layer in its files."""
    source = toys.toy(folder, "qwen3", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    tensors[HEAD] = tensors[EMBEDDING].clone()
    if head == "other":
        tensors[HEAD][-1, -1] += 1
    if head == "wider":
        tensors[HEAD] = tensors[HEAD].float()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


@pytest.mark.parametrize("verify", ["none", "sample", "full"])
def test_a_tied_model_with_another_output_layer(verify: str, tmp_path: Path) -> None:
    source = tied(tmp_path / "hf", "other")
    model = AutoModelForCausalLM.from_pretrained(source)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    refused(source, tmp_path, f"{HEAD} differs from {EMBEDDING}.*set it to false", "--verify", verify)


@pytest.mark.parametrize("head", ["same", "wider"])
def test_a_tied_model_with_the_same_output_layer(head: str, tmp_path: Path) -> None:
    dropped = toys.run(tied(tmp_path / "hf", head), tmp_path / "mg").plan.dropped
    assert dropped == {HEAD: f"a copy of {EMBEDDING}"}


# Two sets of weights


def test_a_single_file_beside_an_index_of_others(tmp_path: Path) -> None:
    source = sharded(tmp_path / "hf")
    other = {name: value + 1 for name, value in toys.read_hf(source).items()}
    save_file(other, source / "model.safetensors", metadata={"format": "pt"})
    read = AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert torch.equal(read[EMBEDDING], other[EMBEDDING])
    refused(source, tmp_path, r"both model\.safetensors and model\.safetensors\.index\.json")


def test_an_index_of_the_single_file(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    index = {"weight_map": dict.fromkeys(load_file(source / "model.safetensors"), "model.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    toys.run(source, tmp_path / "mg")


def test_files_of_other_names_come_last(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    save_file({EMBEDDING: tensors[EMBEDDING] + 1}, source / "draft.safetensors", metadata={"format": "pt"})
    read = AutoModelForCausalLM.from_pretrained(source).state_dict()[EMBEDDING]
    assert torch.equal(read, tensors[EMBEDDING]) and torch.equal(read, open_hf(source)[EMBEDDING].view())


# Headers


def entry(dtype: str, shape: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


GOOD: dict[str, tuple[Any, int]] = {
    "in another order": ({"b": entry("F32", [2], 8, 16), "a": entry("F32", [2], 0, 8)}, 16),
    "empty tensors": ({"a": entry("F32", [0, 4], 0, 0), "b": entry("F32", [], 0, 4)}, 4),
    "nothing": ({}, 0),
}
BAD: dict[str, tuple[Any, int]] = {
    "overlap": ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12),
    "the same bytes": ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 0, 8)}, 8),
    "a hole": ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)}, 20),
    "a hole at the start": ({"a": entry("F32", [2], 4, 12)}, 12),
    "bytes at the end": ({"a": entry("F32", [2], 0, 8)}, 12),
    "bytes behind nothing": ({}, 4),
    "too few bytes for the shape": ({"a": entry("F32", [3], 0, 8)}, 8),
    "too many bytes for the shape": ({"a": entry("F32", [1], 0, 8)}, 8),
    "a shape of fractions": ({"a": entry("F32", [2.0], 0, 8)}, 8),
    "a negative shape": ({"a": entry("F32", [-1, -2], 0, 8)}, 8),
    "a shape that is a number": ({"a": entry("F32", 2, 0, 8)}, 8),
    "true as a size": ({"a": entry("F32", [True, 2], 0, 8)}, 8),
    "offsets that are texts": ({"a": entry("F32", [2], "0", "8")}, 8),
    "offsets that run backwards": ({"a": entry("F32", [2], 8, 0)}, 8),
    "a tensor without a shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8),
    "an unknown type": ({"a": entry("F31", [2], 0, 8)}, 8),
    "a type that is a number": ({"a": entry(32, [2], 0, 8)}, 8),  # type: ignore[arg-type]
    "a list": ([entry("F32", [2], 0, 8)], 8),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": entry("F32", [2], 0, 8)}, 8),
    "a name twice": (
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        8,
    ),
}


def written(path: Path, header: Any, nbytes: int) -> Path:
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))
    return path


@pytest.mark.parametrize("name", GOOD)
def test_headers_that_the_library_reads(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x.safetensors", *GOOD[name])
    with safe_open(path, framework="pt") as file:
        expected = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert {key: stored.shape for key, stored in open_weight_file(path).items()} == expected


@pytest.mark.parametrize("name", BAD)
def test_headers_that_the_library_refuses(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x.safetensors", *BAD[name])
    if name != "a name twice":  # the library takes the last one of some versions
        with pytest.raises(SafetensorError):
            safe_open(path, framework="pt").__enter__()
    with pytest.raises(UserError, match=str(path)):
        open_weight_file(path)


# Types


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_no_floating_point_numbers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    tensors = load_file(source / "model.safetensors")
    tensors[name] = torch.ones_like(tensors[name]).to(dtype)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    refused(source, tmp_path, f"{name} is {str(dtype).removeprefix('torch.')}, which no weight is")


@pytest.mark.parametrize("verify", ["none", "sample"])
@pytest.mark.parametrize(("value", "fits"), [(65519.0, True), (65520.0, False), (-1e30, False), (float("inf"), True)])
def test_numbers_that_fp16_has_no_room_for(value: float, fits: bool, verify: str, tmp_path: Path) -> None:
    """65504 is the largest; what lies nearer to it than to 65536 is rounded to it. What is infinite stays so."""
    name = "model.layers.1.mlp.up_proj.weight"
    source = toys.toy(tmp_path / "hf", "qwen3")
    tensors = {key: each.float() for key, each in load_file(source / "model.safetensors").items()}
    tensors[name][3, 5] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    flags = ("--params-dtype", "fp16", "--verify", verify)
    if fits:
        toys.run(source, tmp_path / "mg", *flags)
        return
    refused(source, tmp_path, f"{name} has values that float16 has no room for, such as", *flags)
    toys.run(source, tmp_path / "bf16", "--params-dtype", "bf16")


# Settings that change what is computed, and that Megatron's model does not have

_WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
_FULL, _SLIDING = "full_attention", "sliding_attention"
SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "windows in turn": (
        "qwen25",
        _WINDOWS | {"layer_types": [_SLIDING, _FULL, _SLIDING, _FULL]},
        "layer_types .* is not known here; expected full_attention in the first max_window_layers",
    ),
    "a window without use_sliding_window": ("qwen3", {"layer_types": [_FULL, _FULL, _FULL, _SLIDING]}, "layer_types"),
    "halves of heads turn": ("deepseek3", {"rope_interleave": False}, "rope_interleave False is not known"),
    "time steps with a bound": ("mamba2", {"time_step_limit": [0.0, 1.0]}, r"time_step_limit \[0.0, 1.0\]"),
    "another activation": ("mamba2", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_megatron_does_not_have(name: str, tmp_path: Path) -> None:
    family, changes, message = SETTINGS[name]
    source = toys.toy(tmp_path / "hf", family)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    refused(source, tmp_path, message)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen25", _WINDOWS | {"layer_types": [_FULL, _FULL, _SLIDING, _SLIDING]}),
        ("qwen3", {"layer_types": [_FULL] * 4, "sliding_window": 8}),
        ("deepseek3", {"rope_interleave": True}),
        ("mamba2", {"time_step_limit": [0.0, float("inf")], "hidden_act": "silu"}),
    ],
)
def test_settings_that_say_the_same(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    toys.run(toys.toy(tmp_path / "hf", family, **changes), tmp_path / "mg")


def test_kinds_of_layers_are_those_of_transformers() -> None:
    """The kinds that transformers derives, for any settings, are not refused; others are."""
    from transformers import Qwen2Config

    for use in (False, True):
        for most in (0, 1, 3, 28):
            config = Qwen2Config(num_hidden_layers=3, use_sliding_window=use, sliding_window=8, max_window_layers=most)
            kinds, said = config.layer_types, config.to_dict() | toys.CONFIGS["qwen25"]
            said |= {"use_sliding_window": use, "sliding_window": 8, "max_window_layers": most, "num_hidden_layers": 3}
            from_hf_config(by_id("qwen25"), said | {"layer_types": kinds}, "config.json")
            other = [_FULL if kind == _SLIDING else _SLIDING for kind in kinds]
            with pytest.raises(UserError, match="layer_types"):
                from_hf_config(by_id("qwen25"), said | {"layer_types": other}, "config.json")


def test_attention_to_later_positions(hf_toy: Callable[[str], Path], tmp_path: Path) -> None:
    source = tmp_path / "hf"
    shutil.copytree(hf_toy("gemma3"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"use_bidirectional_attention": True}))
    refused(source, tmp_path, "use_bidirectional_attention True is not known here; expected false")


# Values of other types


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_parameters", [1]),
        ("rope_scaling", "yarn"),
        ("rms_norm_eps", "1e-5"),
        ("rms_norm_eps", -1),
        ("rope_theta", "x"),
        ("rope_theta", float("nan")),
        ("tie_word_embeddings", "yes"),
        ("hidden_size", 48.0),
        ("num_hidden_layers", "4"),
    ],
)
def test_values_of_other_types(key: str, value: Any) -> None:
    config = toys.CONFIGS["qwen3"] | {key: value}
    with pytest.raises(UserError, match=f"^here: {key} is .*; expected"):
        from_hf_config(by_id("qwen3"), config, "here")


def test_a_language_model_names_its_class(tmp_path: Path) -> None:
    """The configuration of a model with images has the class of the whole only."""
    source = toys.toy(tmp_path / "hf", "qwen25")
    toys.run(source, tmp_path / "mg")
    text = json.loads((source / "config.json").read_text())
    del text["architectures"]
    (source / "config.json").write_text(json.dumps({"model_type": "other", "text_config": text}))
    toys.run(tmp_path / "mg", tmp_path / "back", "--hf-cfg-dir", str(source), of="mg", to="hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts"])
def test_numbers_beyond_any_model_are_refused_at_once(key: str, tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3-moe")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {key: 10**9}))
    with pytest.raises(UserError, match=f"{key} is 1000000000; expected a number of at most 5000"):
        toys.run(source, tmp_path / "mg")
