"""The words in which tables give shapes, as functions of the settings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_llm.errors import UserError

Settings = Mapping[str, Any]

WORDS: dict[str, Callable[[Settings], int]] = {
    "vocab": lambda s: s["vocab_size"],
    "hidden": lambda s: s["hidden_size"],
    "ffn": lambda s: s["ffn_hidden_size"],
    "heads": lambda s: s["num_attention_heads"],
    "groups": lambda s: s["num_query_groups"],
    "head_dim": lambda s: s["kv_channels"],
    "attention": lambda s: s["num_attention_heads"] * s["kv_channels"],
    # Packed projections: query heads, then key heads, then value heads.
    "all_heads": lambda s: s["num_attention_heads"] + 2 * s["num_query_groups"],
    "key_start": lambda s: s["num_attention_heads"],
    "value_start": lambda s: s["num_attention_heads"] + s["num_query_groups"],
    "experts": lambda s: s["num_experts"],
    "expert_ffn": lambda s: s["moe_ffn_hidden_size"],
    "shared_ffn": lambda s: s["moe_shared_expert_intermediate_size"],
    # Multi-head latent attention.
    "q_lora": lambda s: s["q_lora_rank"],
    "kv_lora": lambda s: s["kv_lora_rank"],
    "kv_lora_rope": lambda s: s["kv_lora_rank"] + s["qk_pos_emb_head_dim"],
    "nope": lambda s: s["qk_head_dim"],
    "nope_rope": lambda s: s["qk_head_dim"] + s["qk_pos_emb_head_dim"],
    "nope_value": lambda s: s["qk_head_dim"] + s["v_head_dim"],
    "latent_query": lambda s: s["num_attention_heads"] * (s["qk_head_dim"] + s["qk_pos_emb_head_dim"]),
    "latent_output": lambda s: s["num_attention_heads"] * s["v_head_dim"],
    "index_heads": lambda s: s["index_n_heads"],
    "index_dim": lambda s: s["index_head_dim"],
    "two_hidden": lambda s: 2 * s["hidden_size"],
}


_SIZES = (
    *("num_layers", "hidden_size", "vocab_size", "ffn_hidden_size"),
    *("num_attention_heads", "num_query_groups", "kv_channels", "moe_ffn_hidden_size"),
    *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("mamba_state_dim", "mamba_num_groups", "mamba_head_dim", "mamba_num_heads"),
)


def check(settings: Settings) -> None:
    """Refuse sizes that are none.

    Raises:
        UserError: names the setting and what it is.
    """
    for name in _SIZES:
        size = settings.get(name)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise UserError(
                f"{name} is {size!r}, by config.json or the arguments of the checkpoint; expected a whole number above "
                "0: correct it there"
            )
    heads, groups = settings.get("num_attention_heads"), settings.get("num_query_groups")
    if heads and groups and heads % groups and not settings.get("kv_lora_rank"):
        raise UserError(
            f"{heads} attention heads do not divide into {groups} KV groups (num_key_value_heads); correct them in "
            "config.json, or in the arguments of the checkpoint"
        )


@functools.cache
def parse(shape: str) -> tuple[tuple[str, ...], ...]:
    """For each dimension of a shape in words, the words whose product it is."""
    dims: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    for word in shape.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            inside = []
        elif word == ")":
            dims.append(tuple(inside or ()))
            inside = None
        elif inside is not None:
            inside.append(word)
        else:
            dims.append((word,))
    return tuple(dims)


def value(word: str, settings: Settings, more: Mapping[str, Callable[[Settings], int]]) -> int:
    """The number that a word (or a number in digits) stands for."""
    if word.isdecimal():
        return int(word)
    return more[word](settings) if word in more else WORDS[word](settings)
