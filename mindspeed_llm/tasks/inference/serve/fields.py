"""Typed access to the fields of a request, with errors that name them. A field that is null counts as left out."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from mindspeed_llm.tasks.inference.serve.errors import ApiError, bad_field
from mindspeed_llm.valid_text import why_invalid

_SHOWN = 60


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request. Raises ApiError (400) where it is none."""
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        # The error of the decoding of bytes has them all in it.
        reason = "it is no UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise ApiError(400, f"the body cannot be read as JSON: {reason}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, f"the body is {_shown(found)}; expected a JSON object", code="invalid_json")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class Fields:
    """The fields of one request."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}

    def check_names(self, known: Collection[str]) -> None:
        """Raise ApiError for a field that is not known."""
        for name in self._values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ApiError(400, f"unknown field {name[:_SHOWN]!r}{hint}", param=name, code="unknown_parameter")

    def refuse(self, name: str, harmless: Collection[Any], why: str) -> None:
        """Raise ApiError where a field asks for what there is not; `harmless` values ask for nothing."""
        value = self._values.get(name)
        if value is not None and not any(value == item and type(value) is type(item) for item in harmless):
            raise ApiError(400, f"{name}: {_shown(value)} is not supported: {why}", param=name, code="unsupported")

    def value(self, name: str) -> Any:
        """The value as it is, None where there is none."""
        return self._values.get(name)

    def boolean(self, name: str) -> bool:
        """True or false; false where there is none."""
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            raise wrong_type(name, "true or false", value)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number from `low` to `high`."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(name, "a whole number", value)
        if not low <= value <= high:
            raise bad_field(name, f"{_shown(value)}; expected a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float, *, also: float | None = None) -> float:
        """A number from `low` to `high`, or the one number `also`."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(name, "a number", value)
        if value != also and not (low <= value <= high and math.isfinite(value)):
            other = "" if also is None else f", or {also:g}"
            raise bad_field(name, f"{_shown(value)}; expected a number from {low:g} to {high:g}{other}")
        return float(value)

    def text(self, name: str) -> str | None:
        """Text."""
        value = self._values.get(name)
        return None if value is None else as_text(value, name)

    def object(self, name: str) -> Fields:
        """The fields of an object; empty where there is none."""
        value = self._values.get(name, {})
        if not isinstance(value, dict):
            raise wrong_type(name, "an object", value)
        return Fields(value)


def as_text(value: Any, name: str) -> str:
    """The value of the field `name`, which is to be text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise wrong_type(name, "text", value)
    if reason := why_invalid(value):
        raise bad_field(name, f"{reason}; expected valid text")
    return value


def wrong_type(name: str, expected: str, value: Any) -> ApiError:
    """The error for a value of a type that does not belong there."""
    return ApiError(400, f"{name}: expected {expected}, found {_shown(value)}", param=name, code="invalid_type")


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        name = "object" if isinstance(value, dict) else "list"
        return f"{'an empty' if not value else 'an' if name == 'object' else 'a'} {name}"
    # Whole numbers of thousands of digits cannot be written.
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:
        return "a number of many digits"
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
