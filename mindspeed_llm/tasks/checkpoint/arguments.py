"""Settings of a model: from config.json, from the arguments that a Megatron checkpoint carries, and back to either.

Settings go by the names of Megatron's arguments. A family's table says which key of config.json each one is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.checkpoint.tables import Family, Field


def from_hf_config(family: Family, config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings that a config.json says.

    Raises:
        UserError: a key that the family needs is missing; names it and `where` it was looked for.
    """
    settings: dict[str, Any] = {}
    for spec in family.fields:
        found, value = _first(config, spec.hf)
        if found is None and spec.required:
            raise UserError(f"{where}: {spec.hf[0]} is missing, which a {family.ids[0]} model needs")
        settings[spec.mg] = _completed(spec, value, settings)
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
        value = next((arguments[name] for name in (spec.mg, *spec.also) if arguments.get(name) is not None), None)
        if value is None:
            found, value = _first(arguments, spec.hf)
            if found is not None and spec.negated:
                value = not value
            if found is None and spec.required:
                raise UserError(
                    f"{where}: the checkpoint's arguments do not say {spec.mg}; give --hf-cfg-dir, the folder of the "
                    "model's config.json"
                )
            settings[spec.mg] = _default(spec, settings) if value is None else value
        else:
            settings[spec.mg] = value
    settings |= dict(family.constants)
    if "num_query_groups" in settings:
        settings["num_query_groups"] = _query_groups(arguments, settings)
    return settings


def to_hf_config(family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that says these settings: what the table knows, which is what shapes the tensors and more."""
    config: dict[str, Any] = {"architectures": [family.architectures[0]], "model_type": family.model_type}
    for spec in family.fields:
        value = settings.get(spec.mg)
        if not spec.hf or value is None:
            continue
        *path, last = spec.hf[0].split(".")
        into = config
        for name in path:
            into = into.setdefault(name, {})
        into[last] = (not value) if spec.negated else value
    return config


def to_megatron(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a Megatron checkpoint carries: the settings, and keys of config.json that they do not hide."""
    plain = {name: value for name, value in config.items() if isinstance(value, str | int | float | bool | list)}
    given = {name: value for name, value in settings.items() if value is not None}
    return plain | given | {"add_position_embedding": True, "swiglu": True}


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str | None, Any]:
    for key in keys:
        value: Any = config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            return key, value
    return None, None


def _completed(spec: Field, value: Any, settings: Mapping[str, Any]) -> Any:
    if value is None:
        return _default(spec, settings)
    return (not value) if spec.negated else value


def _default(spec: Field, settings: Mapping[str, Any]) -> Any:
    return spec.default(settings) if callable(spec.default) else spec.default


def _query_groups(arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """The number of KV groups. A training run without `--group-query-attention` has a meaningless 1 in
    `num_query_groups`; a converter's arguments say `num_key_value_heads` and may lack the flag.
    """
    if (groups := arguments.get("num_key_value_heads")) is not None:
        return groups
    if arguments.get("num_query_groups") is not None and arguments.get("group_query_attention", True):
        return arguments["num_query_groups"]
    return settings["num_attention_heads"]
