"""Record formats: alpaca, sharegpt and openai records become one `Conversation`.

Structure that cannot be right (a missing column, a number where text belongs) raises UserError with file, line and key.
A conversation that is well formed but cannot be trained on (roles out of order, ends with the user) raises
`UnusableRecord`; callers count these and report them.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.readers import Record

SOURCE_ROLES = ("user", "observation")
TARGET_ROLES = ("assistant", "function")


class UnusableRecord(Exception):
    """A record without a trainable conversation; the text is the reason, the same for all records of a kind."""


@dataclass(frozen=True)
class Message:
    """One turn. `role` is user, observation (a tool's answer), assistant or function (tool calls as JSON text).

    `reasoning` is thought text that came in a field of its own, `preface` is text in front of tool calls; `loss` False
    keeps a reply out of the loss.
    """

    role: str
    content: str
    reasoning: str = ""
    preface: str = ""
    loss: bool = True


@dataclass(frozen=True)
class Conversation:
    """Messages in order (source turns and replies alternate), with the system text and the tools as JSON text."""

    messages: list[Message]
    system: str = ""
    tools: str = ""


@dataclass(frozen=True)
class RecordFormat:
    """How records of one layout are read: default columns and tags, the columns a record must have, the converter."""

    columns: Mapping[str, str]
    required: tuple[str, ...]
    convert: Callable[["_Fields"], Conversation]
    tags: Mapping[str, str] = field(default_factory=dict)


class _Fields:
    """Typed access to one record by the role of a column ("prompt"), with errors that name file, line and key."""

    def __init__(self, record: Record, columns: Mapping[str, str | None], tags: Mapping[str, str | None]) -> None:
        self.record, self.columns, self.tags = record, columns, tags

    def value(self, name: str, *, required: bool = False) -> Any:
        column = self.columns.get(name)
        if column is None:
            return None
        if column not in self.record.data:
            if required:
                raise missing_column(self.record, name, column)
            return None
        return self.record.data[column]

    def text(self, name: str, *, required: bool = False) -> str:
        value = self.value(name, required=required)
        if value is None and not required:
            return ""
        return self.as_text(value, str(self.columns.get(name)))

    def items(self, name: str, *, required: bool = False) -> list[Any]:
        value = self.value(name, required=required)
        if value is None and not required:
            return []
        if not isinstance(value, list):
            raise self.wrong_type(str(self.columns.get(name)), "a list", value)
        return value

    def as_text(self, value: Any, key: str) -> str:
        if not isinstance(value, str):
            raise self.wrong_type(key, "text", value)
        return value

    def wrong_type(self, key: str, expected: str, value: Any) -> UserError:
        shown = "null" if value is None else f"{type(value).__name__} {json.dumps(value, default=str)[:60]}"
        return UserError(f"{self.record.where}: key {key!r}: expected {expected}, found {shown}")

    def tools(self) -> str:
        value = self.value("tools")
        if value is None or value == "" or value == []:
            return ""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def missing_column(record: Record, name: str, column: str) -> UserError:
    """The error for a record that lacks `column`, the column that plays the role `name`."""
    return UserError(
        f"{record.where}: the record has no key {column!r} (the {name} column); it has {sorted(record.data)}. "
        f"Name the right one under `columns` of the data set"
    )


def to_conversation(
    record: Record, formatting: str, columns: Mapping[str, str | None], tags: Mapping[str, str | None]
) -> Conversation:
    """Convert a record of the named format; see the module text for what is raised when."""
    conversation = FORMATS[formatting].convert(_Fields(record, columns, tags))
    _check_order(conversation.messages)
    return conversation


def _check_order(messages: list[Message]) -> None:
    if not messages:
        raise UnusableRecord("conversation without messages")
    previous = "assistant"
    for message in messages:
        is_source = message.role in SOURCE_ROLES
        # Results of parallel tool calls come as several observations in a row.
        several_results = message.role == "observation" and previous == "observation"
        if is_source != (previous in TARGET_ROLES) and not several_results:
            raise UnusableRecord("roles out of order")
        previous = message.role
    if previous not in TARGET_ROLES:
        raise UnusableRecord("conversation does not end with a reply")


def _alpaca(fields: _Fields) -> Conversation:
    messages = []
    for pair in fields.items("history"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise fields.wrong_type(str(fields.columns["history"]), "pairs [question, answer]", pair)
        question, answer = (fields.as_text(text, str(fields.columns["history"])) for text in pair)
        messages += [Message("user", question), Message("assistant", answer)]
    # The instruction column may be empty or null where the whole question stands in the query column.
    parts = [fields.text("prompt", required=not fields.text("query")), fields.text("query")]
    question = "\n".join(part for part in parts if part)
    if not question.strip():
        raise UnusableRecord("empty prompt")
    messages += [Message("user", question), Message("assistant", fields.text("response", required=True))]
    return Conversation(messages, system=fields.text("system"), tools=fields.tools())


def _sharegpt(fields: _Fields) -> Conversation:
    tags = fields.tags
    roles = {
        tags["user_tag"]: "user",
        tags["observation_tag"]: "observation",
        tags["assistant_tag"]: "assistant",
        tags["function_tag"]: "function",
    }
    system, messages = fields.text("system"), []
    for position, turn in enumerate(fields.items("messages", required=True)):
        role, content = _turn_fields(fields, turn, str(tags["role_tag"]), str(tags["content_tag"]))
        if role == tags["system_tag"] and position == 0:
            system = fields.as_text(content, str(tags["content_tag"]))
        elif role in roles:
            messages.append(Message(roles[role], fields.as_text(content, str(tags["content_tag"]))))
        else:
            raise UnusableRecord(f"unknown role {role!r}")
    return Conversation(messages, system=system, tools=fields.tools())


def _turn_fields(fields: _Fields, turn: Any, role_key: str, content_key: str) -> tuple[Any, Any]:
    if not isinstance(turn, dict):
        raise fields.wrong_type(str(fields.columns["messages"]), "a list of objects", turn)
    if role_key not in turn:
        raise UserError(f"{fields.record.where}: a message has no key {role_key!r}; it has {sorted(turn)}")
    return turn[role_key], turn.get(content_key)


def _openai(fields: _Fields) -> Conversation:
    system, messages = fields.text("system"), []
    for position, turn in enumerate(fields.items("messages", required=True)):
        role, content = _turn_fields(fields, turn, "role", "content")
        calls = turn.get("tool_calls") or []
        text = _openai_text(fields, content, may_be_null=bool(calls))
        if role in ("system", "developer") and position == 0:
            system = text
        elif role == "user":
            messages.append(Message("user", text))
        elif role in ("tool", "function"):
            messages.append(Message("observation", text))
        elif role in ("assistant", "function_call"):
            is_call = bool(calls) or role == "function_call"
            reasoning = fields.as_text(turn.get("reasoning_content") or "", "reasoning_content")
            body, preface = (_openai_calls(fields, calls), text) if calls else (text, "")
            target = "function" if is_call else "assistant"
            messages.append(Message(target, body, reasoning, preface, loss=_loss_weight(fields, turn)))
        else:
            raise UnusableRecord(f"unknown role {role!r}")
    return Conversation(messages, system=system, tools=fields.tools())


def _openai_text(fields: _Fields, content: Any, *, may_be_null: bool) -> str:
    if isinstance(content, list):
        parts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise fields.wrong_type("content", "parts of type text", part)
            parts.append(fields.as_text(part.get("text", part.get("value")), "content"))
        return "".join(parts)
    if content is None and may_be_null:
        return ""
    return fields.as_text(content, "content")


def _openai_calls(fields: _Fields, calls: list[Any]) -> str:
    """Tool calls as the JSON text of a function turn."""
    plain = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if "name" not in function:
            raise fields.wrong_type("tool_calls", "calls with a function name", call)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            # Text that is no JSON is kept: what the model wrote is what it is trained on.
            with contextlib.suppress(json.JSONDecodeError):
                arguments = json.loads(arguments)
        plain.append({"name": function["name"], "arguments": arguments})
    return json.dumps(plain, ensure_ascii=False)


def _loss_weight(fields: _Fields, turn: dict[str, Any]) -> bool:
    weight = turn.get("loss_weight", 1)
    if weight not in (0, 1):
        raise fields.wrong_type("loss_weight", "0 or 1", weight)
    return bool(weight)


SHAREGPT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}

FORMATS: dict[str, RecordFormat] = {
    "alpaca": RecordFormat(
        columns={
            "prompt": "instruction",
            "query": "input",
            "response": "output",
            "history": "history",
            "system": "system",
            "tools": "tools",
        },
        required=("prompt", "response"),
        convert=_alpaca,
    ),
    "sharegpt": RecordFormat(
        columns={"messages": "conversations", "system": "system", "tools": "tools"},
        required=("messages",),
        convert=_sharegpt,
        tags=SHAREGPT_TAGS,
    ),
    "openai": RecordFormat(
        columns={"messages": "messages", "system": "system", "tools": "tools"},
        required=("messages",),
        convert=_openai,
    ),
}
"""Format name (`formatting` of a data set) -> how its records are read."""
