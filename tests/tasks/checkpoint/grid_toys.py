"""The toys of the grid: those of `hf_toy_table` with sizes that four ranks can share, and with MTP layers.

Weights are bf16, and fp32 where checkpoints often have that (the bias of a router, what a state space model decays by):
a conversion must keep each tensor's own dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.tasks.checkpoint import hf_toys, toys
from tests.tasks.checkpoint.hf_toys import OTHERS, TOYS, Toy

NAMES = [*TOYS, *OTHERS]
LAYERS, VOCABULARY = 4, 509
# Left with 6 heads in 2 groups, for which four ranks are too many; and with experts that four ranks cannot share.
NARROW = ("llama-biases", "qwen2-moe")
_EXPERTS = {"qwen2-moe": 6, "mixtral": 6}
_WIDE_HEADS, _WIDE_GROUPS = 12, 4
_FEWER_FACTORS: dict[str, Mapping[str, Any]] = {
    # One factor for each pair of values of a head that turns, of which smaller heads have fewer.
    "phi3": {"short_factor": [1.1], "long_factor": [2.0]},
    "phi3.5-moe": {"short_factor": [1.1] * 2, "long_factor": [2.0] * 2},
}
# Toys without a class: what is larger with more heads.
_WIDER = {
    "bailing_mini": {"attention.query_key_value.weight": (320, 48), "attention.dense.weight": (48, 192)},
    "plm": {
        "self_attn.q_proj.weight": (168, 48),
        "self_attn.kv_b_proj.weight": (264, 14),
        "self_attn.o_proj.weight": (48, 144),
    },
}
_AROUND = {"enorm.weight": (48,), "hnorm.weight": (48,), "eh_proj.weight": (48, 96)}
_ENDS = {"embed_tokens.weight": (VOCABULARY, 48), "shared_head.head.weight": (VOCABULARY, 48)}
_FP32 = ("e_score_correction_bias", "expert_bias", ".A_log", ".dt_bias", "mixer.D")


@dataclass(frozen=True, kw_only=True)
class Mtp:
    """The MTP layers of a toy: how many, which layer each is like, and what else each has."""

    count: int
    like: int
    more: Mapping[str, tuple[int, ...]]


_MTP = {
    "deepseek3": Mtp(count=2, like=3, more=_AROUND | _ENDS | {"shared_head.norm.weight": (48,)}),
    "deepseek32": Mtp(count=2, like=3, more=_AROUND | _ENDS | {"shared_head.norm.weight": (48,)}),
    "glm45": Mtp(count=2, like=3, more=_AROUND | _ENDS | {"shared_head.norm.weight": (48,)}),
    # Layers 0 and 2 have an indexer, as MTP layers do.
    "glm5": Mtp(count=2, like=2, more=_AROUND | {"shared_head.norm.weight": (48,)}),
    "HYV3": Mtp(count=2, like=3, more=_AROUND | {"final_layernorm.weight": (48,)}),
    "bailing_mini": Mtp(count=2, like=3, more=_AROUND | {"final_layernorm.weight": (48,)}),
    # Names of its own, and one such layer only.
    "qwen3-next": Mtp(
        count=1,
        like=3,
        more={
            "mtp.pre_fc_norm_embedding.weight": (48,),
            "mtp.pre_fc_norm_hidden.weight": (48,),
            "mtp.fc.weight": (48, 96),
            "mtp.norm.weight": (48,),
        },
    ),
}


def toy_of(name: str) -> Toy:
    """The toy as the grid has it; without the tensors of its MTP layers, which `save` makes."""
    made = (TOYS | OTHERS)[name]
    changes: dict[str, Any] = {}
    config, more = dict(made.config), dict(made.more)
    if "num_attention_heads" in config and name not in NARROW:
        latent = "kv_lora_rank" in config
        changes = {
            "num_attention_heads": _WIDE_HEADS,
            "num_key_value_heads": _WIDE_HEADS if latent else _WIDE_GROUPS,
        }
    if name in _EXPERTS:
        changes[_experts_key(config)] = _EXPERTS[name]
    if name in _FEWER_FACTORS:
        changes["rope_parameters"] = dict(config["rope_parameters"]) | _FEWER_FACTORS[name]
    if name in _MTP:
        changes["num_nextn_predict_layers"] = _MTP[name].count
        more = {key: shape for key, shape in more.items() if not key.startswith(f"model.layers.{LAYERS}.")}
    for key in more:
        for end, shape in _WIDER.get(name, {}).items():
            if key.endswith(end):
                more[key] = shape
    return replace(made, config=config | changes, more=more)


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of a layer, 0 of a dense model."""
    key = _experts_key(config)
    return config[key] if key else 0


def _experts_key(config: Mapping[str, Any]) -> str:
    return next((key for key in ("num_experts", "n_routed_experts", "num_local_experts") if key in config), "")


def mtp_layers(name: str) -> int:
    """How many MTP layers the toy has."""
    return _MTP[name].count if name in _MTP else 0


def mtp_prefix(name: str, mtp: int) -> str:
    """How names of a toy's MTP layer begin."""
    return "mtp." if name == "qwen3-next" else f"model.layers.{LAYERS + mtp}."


def save(folder: Path, name: str) -> Path:
    """Write the toy's directory."""
    made = toy_of(name)
    config, shapes = hf_toys.of_class(made) if name in TOYS else (dict(made.config), {})
    shapes = shapes | dict(made.more)
    for mtp in range(mtp_layers(name)):
        shapes |= _mtp_shapes(name, mtp, shapes)
    tensors = {key: toys.tensor(key, shape, "F32" if key.endswith(_FP32) else "BF16") for key, shape in shapes.items()}
    hf_toys.repeat_ends(tensors)
    return toys.save_hf(folder, config, tensors)


def _mtp_shapes(name: str, mtp: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    layer, like = mtp_prefix(name, mtp), f"model.layers.{_MTP[name].like}."
    inside = "mtp.layers.0." if name == "qwen3-next" else layer
    found = {inside + key.removeprefix(like): shape for key, shape in shapes.items() if key.startswith(like)}
    around = {key if key.startswith("mtp.") else layer + key: shape for key, shape in _MTP[name].more.items()}
    return found | around


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face directory, by the library of the format."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found
