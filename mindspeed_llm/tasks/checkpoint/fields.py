"""How the settings of a model are spelt: keys of config.json on one side, names of Megatron's arguments on the other.

A family lists its fields in order; a default may be computed from the settings before it. Both directions stand in one
class: what `from_hf` reads, `to_hf` writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mindspeed_llm.errors import UserError

Config = Mapping[str, Any]
"""The content of a config.json."""
Settings = Mapping[str, Any]
"""What a model is, by the names of Megatron's arguments."""


class Spec(Protocol):
    """Some settings and their spellings."""

    def names(self) -> tuple[str, ...]:
        """The settings that it gives."""

    def from_hf(self, config: Config, settings: Settings, where: str) -> dict[str, Any]:
        """The settings by a config.json, found at `where`; `settings` are those read so far.

        Raises:
            UserError: a key is missing, or has a value that nothing is known about.
        """

    def from_megatron(self, arguments: Mapping[str, Any], settings: Settings, where: str) -> dict[str, Any]:
        """The settings by the arguments in a Megatron checkpoint.

        Raises:
            UserError: a setting is missing that has no default.
        """

    def to_hf(self, settings: Settings) -> dict[str, Any]:
        """The keys of config.json that say these settings."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One setting: the name of Megatron's argument and the keys of config.json."""

    mg: str
    hf: tuple[str | Callable[[Config], Any], ...] = ()
    """The first that is present counts: a key (a dot goes into a nested object), or a function of the whole config
    for odd spellings, which may raise ValueError. mg -> hf writes the first key.
    """
    default: Any = None
    """For a config.json that leaves it out: a value, or a function of the settings read so far."""
    required: bool = False
    negated: bool = False
    """Megatron's flag says the opposite."""
    also: tuple[str, ...] = ()
    """Other names under which arguments of checkpoints carry it."""
    values: Mapping[Any, Any] | None = None
    """Value in config.json -> value of the argument, where they differ; of lists, of each element."""
    written: bool = True
    """Whether mg -> hf writes it; not where another field writes the same key."""
    per_layer: bool = False
    """A list, where it is one, has an element for each layer (and perhaps MTP layer)."""
    nullable: bool = False
    """None is a value: in config.json, null says something else than no key."""
    quiet: bool = False
    """mg -> hf leaves the default out."""

    def names(self) -> tuple[str, ...]:
        """See `Spec`."""
        return (self.mg,)

    def from_hf(self, config: Config, settings: Settings, where: str) -> dict[str, Any]:
        """See `Spec`."""
        found, value = self._look_up(config, where)
        if not found:
            if self.required:
                raise UserError(f"{where}: {self._key} is missing; expected a value, the model cannot be read without")
            return {self.mg: self._default(settings)}
        self._check_type(value, where)
        return {self.mg: self._translated(value, where)}

    def from_megatron(self, arguments: Mapping[str, Any], settings: Settings, where: str) -> dict[str, Any]:
        """See `Spec`. Arguments that a converter wrote carry keys of config.json, too."""
        value = next((arguments[name] for name in (self.mg, *self.also) if arguments.get(name) is not None), None)
        if value is not None or (self.nullable and self.mg in arguments):
            return {self.mg: value}
        found, value = self._look_up(arguments, where)
        if not found and self.required:
            raise UserError(
                f"{where}: the checkpoint's arguments do not say {self.mg}; give --hf-cfg-dir, the folder of the "
                "model's config.json"
            )
        return {self.mg: self._translated(value, where) if found else self._default(settings)}

    def to_hf(self, settings: Settings) -> dict[str, Any]:
        """See `Spec`."""
        value = settings.get(self.mg)
        if not self.written or not self._key or (value is None and not self.nullable):
            return {}
        if self.quiet and value == self._default(settings):
            return {}
        if self.per_layer and not isinstance(value, list | tuple):
            return {}  # an interval, which Megatron takes as well
        if self.negated:
            value = not value
        if self.values is not None:
            back = {ours: theirs for theirs, ours in reversed(list(self.values.items()))}
            if not isinstance(value, list | tuple):
                # A training run may have chosen what no config.json can say.
                return {self._key: back[value]} if value in back else {}
            value = [back[each] for each in value]
        return {self._key: value}

    @property
    def _key(self) -> str:
        return next((key for key in self.hf if isinstance(key, str)), "")

    def _default(self, settings: Settings) -> Any:
        return self.default(settings) if callable(self.default) else self.default

    def _look_up(self, config: Config, where: str) -> tuple[bool, Any]:
        for key in self.hf:
            try:
                value = nested(config, key) if isinstance(key, str) else key(config)
            except ValueError as error:
                raise UserError(f"{where}: {error}") from None
            if value is not None or (self.nullable and key in config):
                return True, value
        return False, None

    def _check_type(self, value: Any, where: str) -> None:
        """Refuse a value of config.json of another type than the default, which says what is meant."""
        if self.default is True or self.default is False:
            if not isinstance(value, bool):
                raise UserError(f"{where}: {self._key} is {value!r}; expected true or false")
        elif isinstance(self.default, float) and value is not None:
            good = isinstance(value, int | float) and not isinstance(value, bool)
            if not good or not math.isfinite(value) or value < 0:
                raise UserError(f"{where}: {self._key} is {value!r}; expected a number of at least 0")
        elif self.required and (type(value) is not int or value < 1):
            raise UserError(f"{where}: {self._key} is {value!r}; expected a whole number above 0")

    def _translated(self, value: Any, where: str) -> Any:
        if self.negated:
            return not value
        if self.values is None:
            return value
        many = isinstance(value, list | tuple)
        unknown = [each for each in (value if many else [value]) if each not in self.values]
        if unknown:
            raise UserError(
                f"{where}: {self._key} {unknown[0]!r} is not known here; expected one of "
                f"{', '.join(map(str, self.values))}"
            )
        return [self.values[each] for each in value] if many else self.values[value]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings that one key decides together, such as the activation: each of its values stands for several flags."""

    hf: tuple[str, ...]
    """The first that is present counts; mg -> hf writes the first."""
    options: Mapping[str, Mapping[str, Any]]
    """Value -> the settings that it stands for; those of other values are then False."""
    default: str

    def names(self) -> tuple[str, ...]:
        """See `Spec`."""
        return tuple(dict.fromkeys(name for option in self.options.values() for name in option))

    def from_hf(self, config: Config, settings: Settings, where: str) -> dict[str, Any]:
        """See `Spec`."""
        key = next((key for key in self.hf if config.get(key) is not None), None)
        value = self.default if key is None else config[key]
        if value not in self.options:
            raise UserError(f"{where}: {key} {value!r} is not known here; expected one of {', '.join(self.options)}")
        return {name: self.options[value].get(name, False) for name in self.names()}

    def from_megatron(self, arguments: Mapping[str, Any], settings: Settings, where: str) -> dict[str, Any]:
        """See `Spec`. The key of config.json goes first: converters wrote one flag for all families beside it."""
        if any(arguments.get(key) in self.options for key in self.hf):
            return self.from_hf(arguments, settings, where)
        said = {name: arguments.get(name) or False for name in self.names()}
        option = self._option(said)
        return self.from_hf({}, settings, where) if option is None else said

    def to_hf(self, settings: Settings) -> dict[str, Any]:
        """See `Spec`."""
        option = self._option({name: settings.get(name) or False for name in self.names()})
        return {} if option is None else {self.hf[0]: option}

    def _option(self, said: Settings) -> str | None:
        for value, option in self.options.items():
            if all(said[name] == option.get(name, False) for name in said):
                return value
        return None


@dataclass(frozen=True, kw_only=True)
class Written:
    """A key of config.json that follows from settings: written, never read."""

    hf: str
    value: Callable[[Settings], Any]

    def names(self) -> tuple[str, ...]:
        """See `Spec`."""
        return ()

    def from_hf(self, config: Config, settings: Settings, where: str) -> dict[str, Any]:
        """See `Spec`."""
        return {}

    def from_megatron(self, arguments: Mapping[str, Any], settings: Settings, where: str) -> dict[str, Any]:
        """See `Spec`."""
        return {}

    def to_hf(self, settings: Settings) -> dict[str, Any]:
        """See `Spec`."""
        return {self.hf: self.value(settings)}


@dataclass(frozen=True, kw_only=True)
class Only:
    """A key of config.json that changes what a model computes, and that Megatron's model knows one value of: any other
    is refused. It is not written, since its default says the same.
    """

    hf: str
    holds: Callable[[Any, Settings], bool]
    """Whether a value says what Megatron's model computes."""
    expected: str
    """For people: what is expected instead."""

    def names(self) -> tuple[str, ...]:
        """See `Spec`."""
        return ()

    def from_hf(self, config: Config, settings: Settings, where: str) -> dict[str, Any]:
        """See `Spec`."""
        value = config.get(self.hf)
        if value is not None and not self.holds(value, settings):
            raise UserError(f"{where}: {self.hf} {value!r} is not known here; expected {self.expected}")
        return {}

    def from_megatron(self, arguments: Mapping[str, Any], settings: Settings, where: str) -> dict[str, Any]:
        """See `Spec`. Arguments that a converter wrote carry keys of config.json, too."""
        return self.from_hf(arguments, settings, where)

    def to_hf(self, settings: Settings) -> dict[str, Any]:
        """See `Spec`."""
        return {}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How positions are stretched beyond those that a model was trained on at first.

    config.json has an object for it, which old versions of transformers call `rope_scaling` (with `type` or
    `rope_type`, and `rope_theta` beside it), and version 5 `rope_parameters` (with `rope_theta` inside, and one object
    per kind of layer in some families). Both are read; the old spelling is written, which both versions understand.
    """

    def names(self) -> tuple[str, ...]:
        """See `Spec`."""
        mine = (name for parameters in _ROPE_TYPES.values() for name in parameters.values())
        return ("rope_scaling_type", *dict.fromkeys(mine))

    def from_hf(self, config: Config, settings: Settings, where: str) -> dict[str, Any]:
        """See `Spec`."""
        for key in ("rope_scaling", "rope_parameters"):
            if config.get(key) is not None and not isinstance(config[key], Mapping):
                raise UserError(f'{where}: {key} is {config[key]!r}; expected an object, such as {{"rope_type": ...}}')
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if isinstance(given.get("full_attention"), Mapping):
            given = given["full_attention"]
        kind = given.get("rope_type") or given.get("type") or "default"
        kind = _OLD_TYPES.get(kind, kind)
        found = dict.fromkeys(self.names())
        if kind == "default":
            return found
        if kind not in _ROPE_TYPES:
            raise UserError(
                f"{where}: rope type {kind!r} is not known here; expected one of default, {', '.join(_ROPE_TYPES)}"
            )
        found["rope_scaling_type"] = kind
        for key, name in _ROPE_TYPES[kind].items():
            found[name] = given.get(key)
            if key == _TRAINED:
                # Beside the object it wins, as in transformers; without it, all positions were trained on.
                found[name] = config.get(_TRAINED) or given.get(key) or settings.get("max_position_embeddings")
        return found

    def from_megatron(self, arguments: Mapping[str, Any], settings: Settings, where: str) -> dict[str, Any]:
        """See `Spec`."""
        found = dict.fromkeys(self.names())
        kind = arguments.get("rope_scaling_type")
        names = _ROPE_TYPES.get(str(kind), {}).values()
        return found | {name: arguments.get(name) for name in ("rope_scaling_type", *names) if kind is not None}

    def to_hf(self, settings: Settings) -> dict[str, Any]:
        """See `Spec`."""
        kind = settings.get("rope_scaling_type")
        if kind is None:
            return {}
        said = {key: settings.get(name) for key, name in _ROPE_TYPES[kind].items()}
        scaling = {"rope_type": kind} | {key: value for key, value in said.items() if value is not None}
        beside = {_TRAINED: scaling[_TRAINED]} if kind == "longrope" and _TRAINED in scaling else {}
        return {"rope_scaling": scaling, **beside}


_TRAINED = "original_max_position_embeddings"
# Type -> key of the object -> name of Megatron's argument.
_ROPE_TYPES: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "rope_scaling_factor"},
    "dynamic": {"factor": "dynamic_factor"},
    "llama3": {
        "factor": "rope_scaling_factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        _TRAINED: "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "rope_scaling_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "mscale": "rope_scaling_mscale",
        "mscale_all_dim": "rope_scaling_mscale_all_dim",
        "attention_factor": "rope_scaling_attention_factor",
        "truncate": "rope_scaling_truncate",
        _TRAINED: "rope_scaling_original_max_position_embeddings",
    },
    "longrope": {
        "factor": "rope_scaling_factor",
        "short_factor": "short_factor",
        "long_factor": "long_factor",
        "short_mscale": "short_mscale",
        "long_mscale": "long_mscale",
        "attention_factor": "rope_scaling_attention_factor",
        _TRAINED: "original_max_position_embeddings",
    },
}
_OLD_TYPES = {"su": "longrope"}


def nested(config: Config, key: str) -> Any:
    """The value of a key, in which a dot goes into an object; None where there is none."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def changed(fields: Sequence[Spec], name: str, **changes: Any) -> tuple[Spec, ...]:
    """The fields, of which the one that gives a setting is changed in these attributes."""
    return tuple(replace(spec, **changes) if isinstance(spec, Field) and spec.mg == name else spec for spec in fields)


def without(fields: Sequence[Spec], *names: str) -> tuple[Spec, ...]:
    """The fields that give none of these settings."""
    return tuple(spec for spec in fields if not set(names) & set(spec.names()))
