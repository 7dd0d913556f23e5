"""Typed access to one record by the role of a column ("prompt"), with errors that name file, line and key."""

import json
from collections.abc import Mapping
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.readers import Record

_NO_TOOLS: tuple[Any, ...] = (None, "", "[]", "null", [], {})


class BadRecord(UserError):
    """A record whose structure is wrong. `kind` is the mistake without file, line and value: the same for all records
    with the same mistake, to count them by.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        # Not among the arguments, so that the error travels between processes with its attributes.
        self.kind = kind or message


class RecordFields:
    """The fields of one record. `columns` maps the role of a column to its name, None where the role has none."""

    def __init__(self, record: Record, columns: Mapping[str, str | None], tags: Mapping[str, str | None]) -> None:
        self.record, self.columns, self.tags = record, columns, tags

    def column(self, role: str) -> str:
        """The name of the column that plays the role, for messages."""
        return str(self.columns.get(role))

    def value(self, role: str, *, required: bool = False) -> Any:
        """The value as it is; None where the role has no column or, unless `required`, the record has no such key."""
        column = self.columns.get(role)
        if column is None:
            return None
        if column not in self.record.data:
            if required:
                raise missing_column(self.record, role, column)
            return None
        return self.record.data[column]

    def text(self, role: str, *, required: bool = False) -> str:
        """Text; '' for what is missing or null, unless `required`."""
        value = self.value(role, required=required)
        if value is None and not required:
            return ""
        return self.as_text(value, self.column(role))

    def items(self, role: str, *, required: bool = False) -> list[Any]:
        """A list; empty for what is missing or null, unless `required`."""
        value = self.value(role, required=required)
        if value is None and not required:
            return []
        if not isinstance(value, list):
            raise self.wrong_type(self.column(role), "a list", value)
        return value

    def as_text(self, value: Any, key: str) -> str:
        """The value, which is to be text; `key` names it in the error."""
        if not isinstance(value, str):
            raise self.wrong_type(key, "text", value)
        return value

    def turn_value(self, turn: Any, key: str) -> Any:
        """The value of a key that a message must have."""
        if not isinstance(turn, dict):
            raise self.wrong_type(self.column("messages"), "a list of objects", turn)
        if key not in turn:
            raise BadRecord(
                f"{self.record.where}: a message has no key {key!r}; it has {sorted(turn)}",
                f"a message has no key {key!r}",
            )
        return turn[key]

    def wrong_type(self, key: str, expected: str, value: Any) -> BadRecord:
        """The error for a value of a type that does not belong under `key`."""
        return wrong_type(self.record, key, expected, value)

    def tools(self) -> str:
        """The tools as JSON text; '' where there are none."""
        value = self.value("tools")
        if value in _NO_TOOLS:
            return ""
        if not isinstance(value, str | list | dict):
            raise self.wrong_type(self.column("tools"), "a list of tools, or its JSON text", value)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def missing_column(record: Record, role: str, column: str) -> BadRecord:
    """The error for a record that lacks `column`, the column that plays the role `role`."""
    return BadRecord(
        f"{record.where}: the record has no key {column!r} (the {role} column); it has {sorted(record.data)}. "
        + (
            "Name the right one with --json-keys, or under `columns` of the data set"
            if role == "text"
            else "Name the right one under `columns` of the data set, or with --map-keys"
        ),
        f"missing key {column!r}",
    )


def wrong_type(record: Record, key: str, expected: str, value: Any) -> BadRecord:
    """The error for a value of a type that does not belong under `key`."""
    shown = "null" if value is None else f"{type(value).__name__} {json.dumps(value, default=str)[:60]}"
    return BadRecord(
        f"{record.where}: key {key!r}: expected {expected}, found {shown}", f"key {key!r} is not {expected}"
    )
