"""`--model-from-hf DIR`: the structure of the model from the config.json of a Hugging Face directory."""

from __future__ import annotations

import textwrap
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_llm.core import layer_layout
from mindspeed_llm.errors import UserError
from mindspeed_llm.flag import Flag
from mindspeed_llm.training.arguments.parser import all_flags

_WIDTH = 112
# What may differ from the model's own: how it is trained, not what it is.
_FREE = frozenset({"init_method_std", "moe_aux_loss_coeff"})
# Parts that a model has only where its config.json says so.
_PARTS = (
    "add_qkv_bias",
    "qk_layernorm",
    "sliding_window",
    "window_attn_skip_freq",
    "rope_scaling_type",
    "num_experts",
    "moe_shared_expert_intermediate_size",
    "shared_expert_gate",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
_TOKENIZER_FLAGS = ("tokenizer_type", "tokenizer_name_or_path", "tokenizer_model", "vocab_file", "merge_file")


def apply_model_from_hf(args: Namespace) -> str:
    """Put the structure that `args.model_from_hf` has into `args`, and the tokenizer of the directory where none is
    given; returns the block of text that says what was set.

    Layers without effect (--noop-layers) are added to the number of layers. To be called before `validate`. Needs
    torch.

    Raises:
        UserError: the directory is none, its model is not available, or flags on the command line contradict it.
    """
    folder = Path(args.model_from_hf)
    if not (folder / "config.json").is_file():
        missing = "has no config.json" if folder.is_dir() else "is no folder"
        raise UserError(f"--model-from-hf {folder} {missing}; expected a Hugging Face model directory")
    from mindspeed_llm.tasks.checkpoint.arguments import language_model
    from mindspeed_llm.tasks.checkpoint.families import of_config
    from mindspeed_llm.tasks.checkpoint.hf_reader import read_config
    from mindspeed_llm.tasks.models.hf_arguments import hf_arguments

    config, where = language_model(read_config(folder)), str(folder / "config.json")
    family = of_config(config, where, requested=args.model_type_hf)
    _check_noops(args, hf_arguments(family, config, where)["num_layers"])
    found = hf_arguments(family, config, where, noop_layers=args.noop_layers or ())
    _check_given(args, found, where)
    found |= _dropouts(config)
    if args.moe_router_load_balancing_type in ("none", "sinkhorn"):
        # Then there is no such loss, whatever its coefficient was.
        found.pop("moe_aux_loss_coeff", None)
    taken = {name: value for name, value in found.items() if name not in args.given}
    if not any(name in args.given for name in _TOKENIZER_FLAGS) and any(
        (folder / name).is_file() for name in _TOKENIZER_FILES
    ):
        taken["tokenizer_name_or_path"] = str(folder)
    for name, value in taken.items():
        setattr(args, name, value)
    return _block(f"--model-from-hf {folder} ({family.architectures[0]}) sets", taken)


def _dropouts(config: Mapping[str, Any]) -> dict[str, float]:
    """What transformers' models do in training: dropout of attention weights as config.json says, and no other."""
    return {"attention_dropout": float(config.get("attention_dropout") or 0.0), "hidden_dropout": 0.0}


def _check_noops(args: Namespace, num_layers: int) -> None:
    noops = args.noop_layers or ()
    positions = num_layers + len(noops)
    if len(set(noops)) < len(noops) or any(position >= positions for position in noops):
        raise UserError(
            f"--noop-layers {','.join(map(str, noops))}: expected different positions from 0 to {positions - 1}, the "
            f"{num_layers} layers of --model-from-hf and these"
        )


def _check_given(args: Namespace, found: Mapping[str, Any], where: str) -> None:
    flags = {flag.dest: flag for flag in all_flags().values()}
    wrong = []
    for name in args.given:
        mine = getattr(args, name)
        if name in found and name not in _FREE and not _agrees(args, name, mine, found):
            wrong.append(f"{_words(flags[name], mine)} (config.json: {_short(found[name])})")
        elif name in _PARTS and name not in found and mine:
            wrong.append(f"{_words(flags[name], mine)} (config.json: none)")
    if wrong:
        raise UserError(
            f"flags contradict {where}, which --model-from-hf names: {'; '.join(wrong)}. Leave them out, or name "
            "another model"
        )


def _agrees(args: Namespace, name: str, mine: Any, found: Mapping[str, Any]) -> bool:
    if name == "group_query_attention":
        # With as many groups as heads it makes no difference.
        return mine == found[name] or found["num_query_groups"] == found["num_attention_heads"]
    if name == "moe_layer_freq":
        placed = Namespace(
            num_layers=found["num_layers"],
            noop_layers=args.noop_layers,
            moe_layer_freq=mine,
            first_k_dense_replace=args.first_k_dense_replace,
        )
        if mine == 0 or (isinstance(mine, tuple) and len(mine) != found["num_layers"]):
            return False
        return layer_layout.moe_pattern(placed) == list(found[name])
    return mine == found[name]


def _block(title: str, values: Mapping[str, Any]) -> str:
    """Flags that could be given instead, wrapped."""
    flags = [flag for flag in all_flags().values() if flag.dest in values]
    words = [words for flag in flags if (words := _words(flag, values[flag.dest]))]
    # A flag stays with its value.
    text = " ".join(word.replace(" ", "\0") for word in words)
    lines = textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join([f"{title}:", *(line.replace("\0", " ") for line in lines)])


def _words(flag: Flag, value: Any) -> str:
    """The flag as it would be written; nothing where its absence says the same."""
    if flag.parsing.get("action") is not None:
        return "" if value == flag.default else flag.name
    return f"{flag.name} {_short(value)}"


def _short(value: Any) -> str:
    """A value as the command line has it; a long list of equal stretches in Megatron's notation."""
    if not isinstance(value, tuple):
        return f"{value:g}" if isinstance(value, float) and value == float(f"{value:g}") else str(value)
    stretches: list[list[int]] = []
    for bit in value:
        if stretches and stretches[-1][0] == bit:
            stretches[-1][1] += 1
        else:
            stretches.append([bit, 1])
    return f"({'+'.join(f'[{bit}]*{count}' for bit, count in stretches)})"
