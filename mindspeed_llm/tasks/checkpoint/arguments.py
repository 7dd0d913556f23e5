"""Settings of a model: from config.json, from the arguments that a Megatron checkpoint carries, and back to either.

Settings go by the names of Megatron's arguments; the Megatron backend takes its own from them. A family's table says
which keys of config.json each one is, see `fields`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_llm.tasks.checkpoint.fields import Field
from mindspeed_llm.tasks.checkpoint.tables import Family

# Keys of config.json that hold one element for each layer, whatever the family.
_PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")
# What the configuration of a model with images says for its language model, too.
_OF_ALL_PARTS = ("torch_dtype", "dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def from_hf_config(family: Family, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings that a config.json says.

    Raises:
        UserError: a key that the family needs is missing, or has an unknown value; names it and `where` it was found.
    """
    settings: dict[str, Any] = {}
    for spec in family.fields:
        settings |= spec.from_hf(config, settings, where)
    return settings | dict(family.constants)


def from_megatron(family: Family, arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings that the arguments in a Megatron checkpoint say.

    Checkpoints that a converter wrote carry keys of config.json beside Megatron's arguments, those of a training run
    only the latter.

    Raises:
        UserError: a setting that the family needs is missing.
    """
    settings: dict[str, Any] = {}
    for spec in family.fields:
        settings |= spec.from_megatron(arguments, settings, where)
    settings |= dict(family.constants)
    if "num_query_groups" in settings:
        settings["num_query_groups"] = _query_groups(arguments, settings)
    return settings


def to_hf_config(family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that says these settings, such that transformers computes the same with it."""
    config: dict[str, Any] = {"architectures": [family.architectures[0]], "model_type": family.model_type}
    for spec in family.fields:
        config |= spec.to_hf(settings)
    return config


def to_megatron(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a Megatron checkpoint carries: the settings, and keys of config.json that they do not hide."""
    plain = {name: value for name, value in config.items() if isinstance(value, str | int | float | bool | list)}
    given = dict(settings)
    if "num_query_groups" in settings:
        given["group_query_attention"] = settings["num_query_groups"] != settings["num_attention_heads"]
    return plain | {"add_bias_linear": False, "swiglu": False} | given | {"add_position_embedding": True}


def of_layers(family: Family, settings: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """The settings of a model that has only these layers of it, in order."""
    total = settings["num_layers"]
    names = [spec.mg for spec in family.fields if isinstance(spec, Field) and spec.per_layer]
    lists = {name: settings[name] for name in names if isinstance(settings.get(name), list | tuple)}
    return (
        dict(settings)
        | {"num_layers": len(layers)}
        | {name: _of_layers(values, layers, total) for name, values in lists.items()}
    )


def layer_counts(family: Family, arguments: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> set[int]:
    """How many layers the whole model has, by config.json and by the keys of it that arguments of a checkpoint carry.
    Not by Megatron's own `num_layers`, which counts noop layers, too.
    """
    spec = next(each for each in family.fields if isinstance(each, Field) and each.mg == "num_layers")
    keys = [key for key in spec.hf if isinstance(key, str) and key != "num_layers"]
    counts = {arguments[key] for key in keys if isinstance(arguments.get(key), int)}
    return counts | ({spec.from_hf(config, {}, "config.json")["num_layers"]} if config else set())


def with_layers_of(
    family: Family, config: Mapping[str, Any], arguments: Mapping[str, Any], noops: int
) -> Mapping[str, Any]:
    """A config.json, for a checkpoint that may have fewer layers than it says: then the arguments of the checkpoint say
    of which kinds they are.
    """
    fields = {spec.mg: spec for spec in family.fields if isinstance(spec, Field)}
    whole = fields["num_layers"].from_hf(config, {}, "config.json")["num_layers"]
    held = arguments.get("num_layers", whole) - noops
    if held >= whole:
        return config
    shorter = dict(config) | fields["num_layers"].to_hf({"num_layers": held})
    shorter |= {name: config[name][:held] for name in _PER_LAYER if config.get(name) is not None}
    for name, spec in fields.items():
        if (spec.per_layer or name == "first_k_dense_replace") and arguments.get(name) is not None:
            shorter |= spec.to_hf({name: arguments[name]})
    if "mlp_layer_types" in config and (dense := shorter.get("first_k_dense_replace")) is not None:
        shorter["mlp_layer_types"] = ["dense" if layer < dense else "sparse" for layer in range(held)]
    return shorter


def config_of_layers(family: Family, config: Mapping[str, Any], layers: Sequence[int], total: int) -> dict[str, Any]:
    """The config.json of a model that has only these of `total` layers."""
    key = next(
        key for spec in family.fields if spec.names() == ("num_layers",) for key in spec.to_hf({"num_layers": 0})
    )
    lists = {name: _of_layers(config[name], layers, total) for name in _PER_LAYER if config.get(name) is not None}
    # What is written is never quantised, whatever the weights were that config.json came with.
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    return plain | {key: len(layers)} | lists


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model; all of it, where there is no other part."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    return {key: config[key] for key in _OF_ALL_PARTS if key in config} | dict(text)


def _of_layers(values: Sequence[Any], layers: Sequence[int], total: int) -> list[Any]:
    """The elements of these layers, and those of MTP layers behind them."""
    return [values[layer] for layer in layers if layer < len(values)] + list(values[total:])


def _query_groups(arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """The number of KV groups. A training run without `--group-query-attention` has a meaningless 1 in
    `num_query_groups`; a converter's arguments say `num_key_value_heads` and may lack the flag.
    """
    if (groups := arguments.get("num_key_value_heads")) is not None:
        return groups
    if arguments.get("num_query_groups") is not None and arguments.get("group_query_attention", True):
        return arguments["num_query_groups"]
    return settings["num_attention_heads"]
