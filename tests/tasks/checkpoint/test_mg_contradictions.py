"""Megatron checkpoints that contradict themselves, their config.json, or what their family can be: refused, never read
as another model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_llm.errors import UserError
from tests.tasks.checkpoint import toys

PP = ("--target-pipeline-parallel-size", "2")
State = dict[str, Any]


def change(folder: Path, do: Callable[[State], None], word: str = "") -> None:
    """Save the rank files whose path has `word` anew, changed."""
    paths = [path for path in folder.glob("*/mp_rank_*/*.pt") if word in str(path)]
    assert paths
    for path in paths:
        content = torch.load(path, weights_only=False)
        do(content)
        torch.save(content, path)


def saying(**arguments: Any) -> Callable[[State], None]:
    """Changes arguments; those that are `...` are taken away."""

    def do(content: State) -> None:
        for name, value in arguments.items():
            if value is ...:
                vars(content["args"]).pop(name, None)
            else:
                setattr(content["args"], name, value)

    return do


def without_layer(layer: int) -> Callable[[State], None]:
    """Takes a layer of the first chunk away, by its local index."""

    def do(content: State) -> None:
        model = content["model0" if "model0" in content else "model"]
        lost = [key for key in model if key.startswith(f"decoder.layers.{layer}.")]
        assert lost
        for key in lost:
            del model[key]

    return do


def refused(load: Path, save: Path, match: str, *flags: str) -> None:
    """Converting to Hugging Face is refused with this message, and leaves nothing."""
    with pytest.raises(UserError, match=match):
        toys.run(load, save, *flags, of="mg", to="hf")
    assert not save.exists()


# Lost layers


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("split", [PP, (*PP, "--num-layers-per-virtual-pipeline-stage", "1"), ()])
def test_a_lost_layer_is_no_noop_layer(split: tuple[str, ...], config: bool, tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    toys.run(source, tmp_path / "mg", *split)
    change(tmp_path / "mg", without_layer(0), "mp_rank_00_001" if split else "")
    flags = ("--hf-cfg-dir", str(source)) if config else ()
    refused(tmp_path / "mg", tmp_path / "out", r"no file has the layers at positions \d: 3 layers are left", *flags)


def test_layers_that_nobody_counts_must_be_said(tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    toys.run(source, tmp_path / "mg", *PP, "--noop-layers", "0,5")
    change(tmp_path / "mg", saying(noop_layers=None, num_hidden_layers=...))
    refused(
        tmp_path / "mg", tmp_path / "out", r"at positions 0,5: 4 layers are left, and nothing says .*--noop-layers 0,5"
    )
    toys.run(tmp_path / "mg", tmp_path / "back", "--noop-layers", "0,5", of="mg", to="hf")
    expect_same(source, tmp_path / "back")


def test_a_lost_layer_beside_noop_layers(tmp_path: Path) -> None:
    toys.run(toys.toy(tmp_path / "hf", "qwen3"), tmp_path / "mg", *PP, "--noop-layers", "0,5")
    change(tmp_path / "mg", saying(noop_layers=None))
    change(tmp_path / "mg", without_layer(1), "mp_rank_00_001")
    refused(tmp_path / "mg", tmp_path / "out", "3 layers are left, and the model should have 4")


@pytest.mark.parametrize("config", [True, False])
def test_noop_layers_that_upstream_does_not_write_down(config: bool, tmp_path: Path) -> None:
    source = toys.toy(tmp_path / "hf", "qwen3")
    toys.run(source, tmp_path / "mg", *PP, "--noop-layers", "0,5")
    count = {"num_hidden_layers": ...} if config else {}
    change(tmp_path / "mg", saying(noop_layers=..., **count))
    flags = ("--hf-cfg-dir", str(source)) if config else ()
    toys.run(tmp_path / "mg", tmp_path / "back", *flags, of="mg", to="hf")
    expect_same(source, tmp_path / "back")


def expect_same(source: Path, back: Path) -> None:
    before, after = toys.read_hf(source), toys.read_hf(back)
    assert sorted(before) == sorted(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


# config.json against arguments: equal shapes, another model

OTHER_CONFIGS = {
    "heads": (
        "qwen25",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
        "num_(attention_heads|query_groups) [24]",
    ),
    "rope base": ("qwen3", {"rope_theta": 5e5}, "rotary_base 500000.0"),
    "epsilon": ("qwen3", {"rms_norm_eps": 1e-5}, "norm_epsilon 1e-05"),
    "experts of a token": ("qwen3-moe", {"num_experts_per_tok": 3}, "moe_router_topk 3"),
    "parts of a latent head": ("deepseek3", {"qk_nope_head_dim": 8, "qk_rope_head_dim": 6}, "qk_head_dim 8"),
}


@pytest.mark.parametrize("keys", ["with", "without"])
@pytest.mark.parametrize("name", OTHER_CONFIGS)
def test_another_configuration_of_equal_shapes(name: str, keys: str, tmp_path: Path) -> None:
    """Whether the arguments carry keys of config.json, as those of a converter, or not, as those of training."""
    family, other, message = OTHER_CONFIGS[name]
    mtp = {"num_nextn_predict_layers": 0} if family == "deepseek3" else {}
    source = toys.toy(tmp_path / "hf", family, **mtp)
    toys.run(source, tmp_path / "mg")
    if keys == "without":
        own = dict.fromkeys({*other, "num_key_value_heads", "num_hidden_layers"} - {"num_attention_heads"}, ...)
        change(tmp_path / "mg", saying(**own))
    (tmp_path / "other").mkdir()
    config = json.loads((source / "config.json").read_text()) | other
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    match = f"config.json says {message}, but the checkpoint was made with"
    refused(tmp_path / "mg", tmp_path / "out", match, "--hf-cfg-dir", str(tmp_path / "other"))
    toys.run(tmp_path / "mg", tmp_path / "back", "--hf-cfg-dir", str(source), of="mg", to="hf")


# Arguments against the family

IMPOSSIBLE = {
    "swiglu": False,
    "geglu": True,
    "squared_relu": True,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "qk_layernorm": True,
    "add_bias_linear": True,
    "rotary_percent": 0.5,
    "rotary_interleaved": True,
    "apply_layernorm_1p": True,
    "multi_latent_attention": True,
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_arguments_that_the_family_cannot_have(name: str, tmp_path: Path) -> None:
    config = toys.CONFIGS["qwen25"] | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    toys.run(toys.toy_of(tmp_path / "hf", config), tmp_path / "mg")
    change(tmp_path / "mg", saying(**{name: IMPOSSIBLE[name]}))
    refused(tmp_path / "mg", tmp_path / "out", f"say {name} {IMPOSSIBLE[name]}, but a llama2 model has")


# Arguments about the split

WRONG_TYPES = {
    "num_layers": "4",
    "tensor_model_parallel_size": 1.0,
    "pipeline_model_parallel_size": 0,
    "mtp_num_layers": "x",
    "num_layer_list": "2;2",
    "noop_layers": 3,
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_types(name: str, tmp_path: Path) -> None:
    toys.run(toys.toy(tmp_path / "hf", "qwen3"), tmp_path / "mg")
    change(tmp_path / "mg", saying(**{name: WRONG_TYPES[name]}))
    refused(tmp_path / "mg", tmp_path / "out", f"say {name} {re.escape(repr(WRONG_TYPES[name]))}; expected")


def _wrapped(content: State) -> None:
    content["model"] = {f"module.{key}": value for key, value in content["model"].items()}


def _nested(content: State) -> None:
    content["model"] = {"language_model": content["model"]}


FORMS = {
    "wrapped": (_wrapped, r"module\.embedding.* start with module\., those of a wrapped model"),
    "nested": (_nested, "holds language_model with keys inside"),
    "no chunks": (
        saying(virtual_pipeline_model_parallel_size=2, pipeline_model_parallel_size=2),
        "holds model, but its arguments say virtual pipeline stages .*expected model0, model1",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_other_forms_are_named(name: str, tmp_path: Path) -> None:
    do, match = FORMS[name]
    toys.run(toys.toy(tmp_path / "hf", "qwen3"), tmp_path / "mg", *(PP if name == "no chunks" else ()))
    change(tmp_path / "mg", do)
    refused(tmp_path / "mg", tmp_path / "out", match)


@pytest.mark.parametrize(
    ("says", "name"),
    [({"pipeline_model_parallel_size": 3}, "pipeline"), ({"tensor_model_parallel_size": 5}, "tensor")],
)
def test_arguments_are_named_by_their_own_names(says: dict[str, int], name: str, tmp_path: Path) -> None:
    toys.run(toys.toy(tmp_path / "hf", "qwen3"), tmp_path / "mg", *PP)
    change(tmp_path / "mg", saying(**says))
    with pytest.raises(UserError, match=rf"\.pt: what its arguments say .*{name}_model_parallel_size \d") as caught:
        toys.run(tmp_path / "mg", tmp_path / "out", of="mg", to="hf")
    assert "--target" not in str(caught.value)
