"""Every family, as transformers saves it: HF -> Megatron -> HF bit for bit, and transformers computes the same after.

The configuration that the way back writes is made of what the checkpoint's arguments say: equal logits prove that no
setting is lost, and that the Megatron backend finds all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint import arguments, families
from tests.tasks.checkpoint import hf_toys, toys
from tests.tasks.checkpoint.test_convert import expect_same_hf

# Keys of config.json that may change: who wrote it, and what a class adds to what it was given.
_NOT_COMPARED = {
    *("_name_or_path", "architectures", "transformers_version", "head_dim"),
    # Numbers of new weights and of draws, and one that JSON has no spelling for.
    *("initializer_range", "num_nextn_predict_layers", "time_step_limit"),
}


@pytest.mark.parametrize("name", [*hf_toys.TOYS, *hf_toys.OTHERS])
def test_round_trip(name: str, hf_toy: Callable[[str], Path], tmp_path: Path) -> None:
    source, made = hf_toy(name), (hf_toys.TOYS | hf_toys.OTHERS)[name]
    for number, split in enumerate(made.split):
        between, back = tmp_path / f"mg{number}", tmp_path / f"hf{number}"
        toys.run(source, between, *split.split(), "--model-type-hf", made.family)
        config = ["--hf-cfg-dir", str(source)] if number else []
        toys.run(between, back, *config, of="mg", to="hf")
        expect_same_hf(source, back)
    if name in hf_toys.TOYS:
        expect_same_model(source, tmp_path / "hf0", made)


def expect_same_model(source: Path, back: Path, made: hf_toys.Toy) -> None:
    """transformers reads the same configuration and computes the same logits."""
    from transformers import AutoConfig

    before, after = (AutoConfig.from_pretrained(folder).to_dict() for folder in (source, back))
    for config, folder in ((before, source), (after, back)):
        # A configuration may count MTP layers that its checkpoint does not have; ours does not.
        if not any(name.startswith("model.layers.4.") for name in toys.read_hf(folder)):
            config.pop("num_nextn_predict_layers", None)
    differences = {key for key in before if before[key] != after.get(key)} - _NOT_COMPARED
    assert not differences, {key: (before.get(key), after.get(key)) for key in differences}
    ids = torch.arange(80).reshape(2, 40) * 6 % 500 + 3
    with torch.no_grad():
        logits = [_load(folder, made)(ids).logits for folder in (source, back)]
    assert logits[0].std() > 0.1 and torch.equal(*logits)


def _load(folder: Path, made: hf_toys.Toy) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    if made.family == "longcat":
        # Its class wants weights of experts that do nothing, which checkpoints do not have.
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        model.save_pretrained(folder.parent / f"{folder.name}_whole")
        weights = load_file(folder.parent / f"{folder.name}_whole" / "model.safetensors")
        save_file(weights | toys.read_hf(folder), folder.parent / f"{folder.name}_whole" / "model.safetensors")
        folder = folder.parent / f"{folder.name}_whole"
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert not [name for name in report["unexpected_keys"] if not name.startswith("model.layers.4.")]
    return model.eval()


# What a config.json may leave out, and transformers then takes from the class.
_OPTIONAL = {
    *("rms_norm_eps", "layer_norm_epsilon", "hidden_act", "hidden_activation"),
    *("rope_parameters", "tie_word_embeddings", "attention_bias", "attention_out_bias"),
    *("mlp_bias", "lm_head_bias", "use_bias", "use_conv_bias"),
    *("use_qk_norm", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("layer_types", "mlp_layer_types", "indexer_types", "mlp_only_layers"),
    *("decoder_sparse_step", "norm_topk_prob", "first_k_dense_replace", "routed_scaling_factor"),
    *("router_scaling_factor", "scoring_func", "topk_method", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping", "swiglu_limit", "swiglu_alpha"),
    *("index_topk", "zero_expert_num", "conv_kernel", "chunk_size"),
    "linear_conv_kernel_dim",
}


@pytest.mark.parametrize("name", hf_toys.TOYS)
def test_default_configuration(name: str) -> None:
    """The configuration of a class at full size, whole and with defaults left out: Megatron's arguments say all."""
    from transformers import AutoConfig

    made = hf_toys.TOYS[name]
    family = families.by_id(made.family)
    whole = AutoConfig.for_model(made.config["model_type"]).to_dict()
    few = {key: value for key, value in whole.items() if key not in _OPTIONAL and value is not None}
    for config in (whole, few):
        says = arguments.to_megatron(arguments.from_hf_config(family, config, "config.json"), {})
        again = arguments.to_hf_config(family, arguments.from_megatron(family, says, "arguments"))
        del again["architectures"]
        after = AutoConfig.for_model(**json.loads(json.dumps(again))).to_dict()
        differences = {key for key in whole if whole[key] != after.get(key)} - _NOT_COMPARED
        if differences == {"rope_parameters"}:  # which says that all of a head turns
            assert after["rope_parameters"] == whole["rope_parameters"] | {"partial_rotary_factor": 1.0}
        else:
            assert not differences, {key: (whole[key], after.get(key)) for key in differences}


TRAINED = ["qwen2-moe", "deepseek32", "glm5", "gemma3", "gpt-oss", "phi3.5-moe", "longcat", "HYV3"]


@pytest.mark.parametrize("name", TRAINED)
def test_arguments_without_keys_of_hugging_face(name: str, hf_toy: Callable[[str], Path], tmp_path: Path) -> None:
    """A training run's checkpoint has arguments under Megatron's names alone; experts of layers may be a list."""
    source = hf_toy(name)
    toys.run(source, tmp_path / "mg", "--verify", "none")
    toys.run(tmp_path / "mg", tmp_path / "before", "--verify", "none", of="mg", to="hf")
    config = json.loads((source / "config.json").read_text())
    settings = _settings(config)
    [path] = (tmp_path / "mg").glob("*/*/*.pt")
    content = torch.load(path, weights_only=False)
    for key in config.keys() - settings.keys():
        vars(content["args"]).pop(key, None)
    if name == "deepseek32":
        content["args"].first_k_dense_replace, content["args"].moe_layer_freq = None, [0, 1, 1, 1]
    torch.save(content, path, pickle_protocol=4)
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    expect_same_hf(tmp_path / "before", tmp_path / "back")
    before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("before", "back"))
    assert before == after


def test_ids_of_upstream() -> None:
    """What upstream's converter takes as --model-type-hf, and what is added."""
    upstream = (
        "qwen3 qwen3-moe deepseek2 deepseek3 gemma2 glm45-air glm45 llama2 qwen25 bailing_mini qwen3-next qwen2-moe "
        "seed-oss deepseek32 magistral deepseek2-lite phi3.5 phi3.5-moe plm mamba2 longcat glm5 minimax_m2 HYV3"
    )
    assert set(upstream.split()) <= set(families.family_ids())
    for name in ("deepseek4", "deepseek4_base"):
        with pytest.raises(UserError, match=f"--model-type-hf {name} cannot be converted: .* DeepSeek-V4"):
            families.by_id(name)
    more = {"mistral", "mixtral", "glm4", "gemma3", "internlm3", "gpt-oss", "llama3", "qwen2", "phi3"}
    assert more <= set(families.family_ids())
    assert len(families.family_ids()) == len(set(families.family_ids()))
    assert all(family.models for family in families.FAMILIES)


def test_families_without_a_class_say_so() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    without = {family.ids[0] for family in families.FAMILIES if family.no_class}
    assert without == set(hf_toys.OTHERS)
    for family in families.FAMILIES:
        assert (family.model_type in CONFIG_MAPPING_NAMES) != bool(family.no_class), family.ids


ROPE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # spelling of one scaling, old and new, and the arguments that it is
    "yarn": (
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": 4.0,
            "rope_scaling_original_max_position_embeddings": 32768,
        },
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {
            "rope_scaling_type": "llama3",
            "rope_scaling_factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "su": (
        {"type": "su", "short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 4096},
        {
            "rope_scaling_type": "longrope",
            "short_factor": [1.0],
            "long_factor": [2.0],
            "original_max_position_embeddings": 4096,
        },
    ),
    "dynamic": ({"type": "dynamic", "factor": 6.0}, {"rope_scaling_type": "dynamic", "dynamic_factor": 6.0}),
    "linear": ({"type": "linear", "factor": 2.0}, {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0}),
    "none": ({"rope_type": "default"}, {"rope_scaling_type": None}),
}


@pytest.mark.parametrize("name", ROPE)
def test_both_spellings_of_rotary_positions(name: str) -> None:
    scaling, expected = ROPE[name]
    base = toys.CONFIGS["qwen3"] | {"max_position_embeddings": 40960}
    old = base | {"rope_theta": 1e6, "rope_scaling": scaling}
    new = base | {"rope_parameters": scaling | {"rope_theta": 1e6}}
    settings = [_settings(config) for config in (old, new)]
    assert settings[0] == settings[1]
    assert settings[0]["rotary_base"] == 1e6
    assert {key: value for key, value in settings[0].items() if key in expected} == expected
    # What Megatron's arguments say of it is all that is needed to write it down again.
    family = families.by_id("qwen3")
    arguments_ = arguments.to_megatron(settings[0], {})
    again = arguments.to_hf_config(family, arguments.from_megatron(family, arguments_, "here"))
    assert again["rope_theta"] == 1e6 and _settings(again) == settings[0]


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    return arguments.from_hf_config(families.of_config(config, "config.json"), config, "config.json")


def test_settings_of_training() -> None:
    """Under the names of Megatron's arguments, in families that differ."""
    deepseek = _settings(
        toys.CONFIGS["deepseek3"] | {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "hidden_act": "silu"}
    )
    assert {
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 8,
        "moe_router_group_topk": 4,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
        "norm_topk_prob": True,
        "moe_shared_expert_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "multi_latent_attention": True,
        "swiglu": True,
        "normalization": "RMSNorm",
        "untie_embeddings_and_output_weights": True,
        "norm_epsilon": 1e-6,
    }.items() <= deepseek.items()
    gemma = _settings(toys.CONFIGS["qwen3"] | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"})
    assert {
        "geglu": True,
        "gelu_tanh": True,
        "swiglu": False,
        "add_rmsnorm_offset": True,
        "input_embeds_norm": True,
        "post_norm": True,
        "attn_logit_softcapping": 50.0,
        "output_logit_softcapping": 30.0,
        "window_attn_skip_freq": [1, 0, 1, 0],
    }.items() <= gemma.items()
    # A training run may say every which layer has full attention.
    assert "layer_types" in arguments.to_hf_config(families.by_id("gemma2"), gemma)
    assert "layer_types" not in arguments.to_hf_config(families.by_id("gemma2"), gemma | {"window_attn_skip_freq": 1})
    assert arguments.to_megatron(deepseek, {})["add_bias_linear"] is False
    assert arguments.to_megatron(gemma, {})["group_query_attention"] is True


REFUSED = [
    # (family, what config.json says, the reason)
    ("qwen3", {"rope_scaling": {"type": "spiral"}}, "rope type 'spiral' is not known here; expected one of default, l"),
    ("qwen3", {"hidden_act": "tanh"}, "hidden_act 'tanh' is not known here; expected one of silu, gelu, gelu_pyt"),
    ("qwen3", {"hidden_size": None}, "config.json: hidden_size is missing"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 4}, "layer_types 'chunked_attention' is not known here"),
    ("HYV3", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types has a dense layer behind a sparse one"),
    (
        "qwen3-next",
        {"layer_types": ["full_attention", "x", "x"], "shared_expert_intermediate_size": 8},
        "layer_types has full attention at uneven distances",
    ),
]


@pytest.mark.parametrize(("family", "says", "reason"), REFUSED)
def test_configurations_that_are_refused(family: str, says: dict[str, Any], reason: str) -> None:
    table = families.by_id(family)
    with pytest.raises(UserError, match=reason):
        arguments.from_hf_config(table, toys.CONFIGS["qwen3-moe"] | says, "config.json")


def test_the_model_type_decides_between_families_of_one_class() -> None:
    """InternLM 3 runs on Llama's class; code that models bring may have any model type."""
    for config, expected in (
        ({"architectures": ["LlamaForCausalLM"], "model_type": "internlm3"}, "internlm3"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "llama2"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}, "deepseek3"),
        ({"model_type": "glm4"}, "glm4"),
    ):
        assert families.of_config(config, "config.json").ids[0] == expected
    with pytest.raises(UserError, match="belong to no family that is known here"):
        families.of_config({"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe"}, "config.json")


@pytest.mark.parametrize(("name", "prefix"), [("gemma3", "language_model."), ("mistral", "model.language_model.")])
def test_language_model_of_a_model_with_images(
    name: str, prefix: str, hf_toy: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its configuration stands in an object of its own, its tensors behind a prefix; the rest is dropped by name."""
    source = hf_toy(name)
    config = json.loads((source / "config.json").read_text())
    del config["architectures"]
    tensors = toys.read_hf(source)
    whole = toys.save_hf(
        tmp_path / "hf",
        {"architectures": ["SomeForConditionalGeneration"], "model_type": "some", "text_config": config},
        {_inside(key, prefix): value for key, value in tensors.items()}
        | {"vision_tower.patch_embedding.weight": torch.ones(2), "multi_modal_projector.linear.bias": torch.ones(2)},
    )
    dropped = toys.run(whole, tmp_path / "mg", "--target-tensor-parallel-size", "2").plan.dropped
    assert set(dropped) == {"vision_tower.patch_embedding.weight", "multi_modal_projector.linear.bias"}
    toys.run(tmp_path / "mg", tmp_path / "back", "--hf-cfg-dir", str(whole), of="mg", to="hf")
    expect_same_hf(source, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == config["model_type"]


def _inside(name: str, prefix: str) -> str:
    """The name of a tensor in a model with images, as old and new versions of transformers write it."""
    return prefix + name if prefix == "language_model." else re.sub(r"^model\.", prefix, name)


def test_fewer_layers_take_their_kinds_with_them(hf_toy: Callable[[str], Path], tmp_path: Path) -> None:
    """Lists with one element for each layer follow when dense layers are left out at the start."""
    source = hf_toy("glm5")
    fewer = ("--first-k-dense-replace", "0", "--num-layers", "3", "--mtp-num-layers", "1")
    toys.run(source, tmp_path / "mg", *fewer)
    [tensors] = toys.read_mg(tmp_path / "mg").values()
    with_indexer = {key.split(".")[2] for key in tensors if key.startswith("decoder.") and "dsa_indexer.wk" in key}
    assert with_indexer == {"1"}
    toys.run(tmp_path / "mg", tmp_path / "back", of="mg", to="hf")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["first_k_dense_replace"]) == (3, 0)
    assert config["indexer_types"] == ["shared", "full", "shared"]
    before, after = toys.read_hf(source), toys.read_hf(tmp_path / "back")
    for name, value in after.items():
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            name = f"model.layers.{int(layer) + 1}.{rest}"
        assert torch.equal(value, before[name]), name
    toys.run(tmp_path / "mg", tmp_path / "again", "--hf-cfg-dir", str(source), of="mg", to="hf")
    expect_same_hf(tmp_path / "back", tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert [again[key] for key in ("num_hidden_layers", "first_k_dense_replace")] == [3, 0]
    assert again["indexer_types"] == config["indexer_types"]
    assert again["mlp_layer_types"] == ["sparse"] * 3 and len(again["layer_types"]) == 3
    toys.run(source, tmp_path / "whole")
    with pytest.raises(UserError, match="would give layers of the Hugging Face output other numbers"):
        toys.run(tmp_path / "whole", tmp_path / "short", *fewer[:2], of="mg", to="hf")


def test_experts_that_do_nothing_are_dropped_by_name(hf_toy: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers 5 saves weights for them."""
    source = hf_toy("longcat")
    extra = {f"model.layers.0.mlp.experts.{expert}.gate_proj.weight": torch.ones(24, 48) for expert in (8, 11)}
    config = json.loads((source / "config.json").read_text())
    more = toys.save_hf(tmp_path / "hf", config, toys.read_hf(source) | extra)
    dropped = toys.run(more, tmp_path / "mg").plan.dropped
    assert dropped == dict.fromkeys(extra, "experts that do nothing need no weights")
    with pytest.raises(UserError, match="its layers have two of each norm"):
        toys.run(source, tmp_path / "te", "--transformer-impl", "transformer_engine")
