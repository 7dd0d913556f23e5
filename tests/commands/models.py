"""Models that conversion commands are tried on: toys with values, and models of full depth without any."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.tasks.checkpoint.arguments import from_hf_config
from mindspeed_llm.tasks.checkpoint.families import of_config
from mindspeed_llm.tasks.checkpoint.layout import Topology
from mindspeed_llm.tasks.checkpoint.model import Model, bind
from mindspeed_llm.tasks.checkpoint.safetensors_file import header
from tests.tasks.checkpoint.hf_toy_table import OTHERS, TOYS

# (toy with the right keys in its config.json, what the model of this name says in them): all that a way to split can
# fail on. Widths stay those of a toy.
_FULL: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-2-7B": ("llama", {"layers": 32, "heads": 32, "groups": 32, "vocab": 32000}),
    "Mixtral-8x7B": ("mixtral", {"layers": 32, "heads": 32, "groups": 8, "vocab": 32000, "num_local_experts": 8}),
    "Magistral-Small": ("mistral", {"layers": 40, "heads": 32, "groups": 8, "vocab": 131072}),
    "Qwen2.5-7B": ("qwen2", {"layers": 28, "heads": 28, "groups": 4, "vocab": 152064}),
    "Qwen3-8B": ("qwen3", {"layers": 36, "heads": 32, "groups": 8, "vocab": 151936, "attention_bias": False}),
    "Qwen3-32B": ("qwen3", {"layers": 64, "heads": 64, "groups": 8, "vocab": 151936, "attention_bias": False}),
    "Qwen3-30B-A3B": ("qwen3-moe", {"layers": 48, "heads": 32, "groups": 4, "vocab": 151936, "num_experts": 128}),
    "Qwen3-235B-A22B": ("qwen3-moe", {"layers": 94, "heads": 64, "groups": 4, "vocab": 151936, "num_experts": 128}),
    "Qwen3-Coder-480B": ("qwen3-moe", {"layers": 62, "heads": 96, "groups": 8, "vocab": 151936, "num_experts": 160}),
    "Qwen3-Next-80B": (
        "qwen3-next",
        {
            **{"layers": 48, "heads": 16, "groups": 2, "vocab": 151936, "num_experts": 512},
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12,
        },
    ),
    "DeepSeek-V2-Lite": (
        "deepseek2-lite",
        {"layers": 27, "heads": 16, "groups": 16, "vocab": 102400, "n_routed_experts": 64},
    ),
    "DeepSeek-V3": (
        "deepseek3",
        {
            **{"layers": 61, "heads": 128, "groups": 128, "vocab": 129280, "n_routed_experts": 256},
            **{"first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
        },
    ),
    "DeepSeek-V3.2": (
        "deepseek32",
        {
            **{"layers": 61, "heads": 128, "groups": 128, "vocab": 129280, "n_routed_experts": 256},
            **{"first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
        },
    ),
    "GLM-5": (
        "glm5",
        {
            **{"layers": 78, "heads": 64, "groups": 64, "vocab": 154880, "n_routed_experts": 256},
            **{"first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "indexer_types": None},
        },
    ),
    "GLM-4.5": (
        "glm45",
        {
            **{"layers": 92, "heads": 96, "groups": 8, "vocab": 151552, "n_routed_experts": 160},
            **{"first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
        },
    ),
    "GLM-4.5-Air": (
        "glm45",
        {
            **{"layers": 46, "heads": 96, "groups": 8, "vocab": 151552, "n_routed_experts": 128},
            **{"first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
        },
    ),
    "LongCat-Flash": (
        "longcat",
        {
            **{"num_layers": 28, "heads": 64, "groups": 64, "vocab": 131072, "n_routed_experts": 512},
            "zero_expert_num": 256,
        },
    ),
    "Ling-mini-2.0": ("bailing_mini", {"layers": 20, "heads": 16, "groups": 4, "vocab": 157184, "num_experts": 256}),
    "Ring-1T": (
        "bailing_mini",
        {
            **{"layers": 80, "heads": 64, "groups": 8, "vocab": 157184, "num_experts": 256},
            "first_k_dense_replace": 4,
        },
    ),
    "Phi-3.5-mini": ("phi3", {"layers": 32, "heads": 32, "groups": 32, "vocab": 32064}),
    "Phi-3.5-MoE": ("phi3.5-moe", {"layers": 32, "heads": 32, "groups": 8, "vocab": 32064, "num_local_experts": 16}),
    "PLM-1.8B": ("plm", {"layers": 32, "heads": 16, "groups": 16, "vocab": 151936}),
    "Gemma-2-9B": ("gemma2", {"layers": 42, "heads": 16, "groups": 8, "vocab": 256000}),
    "Seed-OSS-36B": ("seed-oss", {"layers": 64, "heads": 80, "groups": 8, "vocab": 155136}),
}
_KEYS = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads",
    "vocab": "vocab_size",
}


def toy_config(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a toy of `hf_toy_table`, with some keys changed; those that become None are left out."""
    config = dict((TOYS | OTHERS)[name].config) | changes
    return {key: value for key, value in config.items() if value is not None}


def full_config(model: str) -> dict[str, Any]:
    """The config.json of a model with its layers, heads, experts and vocabulary, all of them narrow."""
    toy, counts = _FULL[model]
    changes = {_KEYS.get(key, key): value for key, value in counts.items()}
    narrow = {key: 32 for key in ("intermediate_size", "moe_intermediate_size", "ffn_hidden_size")}
    # A multiple of the heads, for models that say no width of a head.
    return toy_config(toy) | narrow | {"hidden_size": 2 * counts["heads"]} | changes


def model_of(config: Mapping[str, Any], topology: Topology, *, requested: str | None = None, **fewer: Any) -> Model:
    """The model that a config.json says, split like this; the checks of a conversion included. `fewer` as `bind`."""
    family = of_config(config, "config.json", requested=requested)
    return bind(family, from_hf_config(family, config, "config.json"), topology, **fewer)


def header_only(folder: Path, config: Mapping[str, Any]) -> Path:
    """A Hugging Face directory with all names and shapes of a model in bf16, whose values are a hole in the file."""
    tensors = model_of(config, Topology(mtp_num_layers=config.get("num_nextn_predict_layers", 0))).hf_tensors()
    start, _, size = header({name: (torch.bfloat16, tensor.shape) for name, tensor in tensors.items()})
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(start)
        file.truncate(size)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
