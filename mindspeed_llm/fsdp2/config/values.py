"""From what stands in a YAML file or on a command line to the typed value of a field.

Every function raises `ValueError` with what was found; the caller adds where, and what the field expects.
"""

import json
import math
from typing import Any

from mindspeed_llm.fsdp2.config.fields import FieldSpec

_BOOLS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}
_NONE_HINT = "write null for no value; None would be a text of four letters"


def from_yaml(spec: FieldSpec, value: Any) -> Any:
    """The typed value of field `spec` for a value that the YAML reader made."""
    if value is None:
        return _null(spec)
    _refuse_none_text(value)
    if spec.kind is list:
        if not isinstance(value, list):
            raise ValueError(f"{_named(value)} is no list; write [{_plain(value)}]")
        for item in value:
            _refuse_none_text(item)
        return [_scalar(spec.item, item) for item in value]
    if spec.kind is dict:
        return _dataset_choice(value)
    return checked(spec, _scalar(spec.kind, value))


def from_tokens(spec: FieldSpec, tokens: list[str]) -> Any:
    """The typed value of field `spec` for the words that follow its option on the command line."""
    if tokens == ["null"]:
        return _null(spec)
    for token in tokens:
        _refuse_none_text(token)
    if spec.kind is bool and not tokens:
        return True
    if not tokens:
        raise ValueError("no value follows the option")
    if spec.kind is list:
        if tokens[0].startswith("["):
            raise ValueError(f"{tokens[0]!r} looks like a YAML or JSON list; separate the items by spaces instead")
        return [_number_or_text(spec.item, token) for token in tokens]
    if spec.kind is dict and tokens[0].lstrip().startswith(("{", "[")):
        return _dataset_choice(_json(" ".join(tokens)))
    if spec.kind is dict:
        return tokens[0] if len(tokens) == 1 else list(tokens)
    if len(tokens) > 1:
        raise ValueError(f"{len(tokens)} values follow the option: {' '.join(tokens)}; put quotes around one text")
    return checked(spec, _number_or_text(spec.kind, tokens[0]))


def checked(spec: FieldSpec, value: Any) -> Any:
    """`value`, which has the right type, if it is one of the choices and within the range of field `spec`."""
    if spec.choices and value not in spec.choices:
        raise ValueError(f"{value!r} is not a choice")
    if spec.range is not None and not spec.range.contains(value):
        raise ValueError(f"{value!r} is out of range")
    return value


def _null(spec: FieldSpec) -> None:
    if not spec.optional:
        raise ValueError("null is no value of this field; leave the field out to keep its default")


def _refuse_none_text(value: Any) -> None:
    if value == "None":
        raise ValueError(f"'None' is a text; {_NONE_HINT}")


def _scalar(kind: type | None, value: Any) -> Any:
    """A YAML value as `kind`. Numbers are not read from quoted texts; 0 and 1 and yes and no are booleans."""
    if kind is bool:
        text = str(value).lower()
        if text not in _BOOLS:
            raise ValueError(f"{_named(value)} is neither true nor false")
        return _BOOLS[text]
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{_named(value)} is no text" + _quotes_hint(value))
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{_named(value)} is no number" + _unquote_hint(kind, value))
    if kind is int:
        if not isinstance(value, int):
            raise ValueError(f"{value!r} is not an integer")
        return value
    return _finite(value)


def _number_or_text(kind: type | None, token: str) -> Any:
    """A word of the command line as `kind`."""
    if kind is bool:
        return _scalar(bool, token)
    if kind is int:
        try:
            return int(token)
        except ValueError:
            raise ValueError(f"{token!r} is not an integer") from None
    if kind is float:
        try:
            return _finite(float(token))
        except ValueError:
            raise ValueError(f"{token!r} is no finite number") from None
    return token


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def _dataset_choice(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} of the mapping is no text")
        return value
    if isinstance(value, list):
        for item in value:
            if not isinstance(item, str):
                raise ValueError(f"{_named(item)} in the list is no name; one mapping stands without a list around it")
        return value
    raise ValueError(f"{_named(value)} is neither a mapping nor a name nor a list of names")


def _json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{text!r} is no valid JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}"
        ) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"the key {key!r} stands twice in the JSON mapping")
        mapping[key] = value
    return mapping


def _named(value: Any) -> str:
    """A value with the name of its YAML type."""
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "a mapping",
    }
    name = names.get(type(value), f"of type {type(value).__name__}")
    return f"{value!r} ({name})" if isinstance(value, str) else f"{_plain(value)} ({name})"


def _plain(value: Any) -> Any:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else value


def _quotes_hint(value: Any) -> str:
    return "; put it in quotes" if isinstance(value, bool | int | float) else ""


def _unquote_hint(kind: type | None, value: Any) -> str:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return ""
        return "; remove the quotes"
    return ""
