"""OpenAI records: messages with role and content, tool calls and their results, reasoning in a field of its own."""

import contextlib
import json
from typing import Any

from mindspeed_llm.tasks.preprocess.records.conversation import Conversation, Message, bad_role
from mindspeed_llm.tasks.preprocess.records.fields import RecordFields
from mindspeed_llm.tasks.preprocess.records.message_lists import read_messages, read_reply

COLUMNS = {
    "messages": "messages",
    "system": "system",
    "tools": "tools",
    "chosen": "chosen",
    "rejected": "rejected",
}


_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "function_call")


def messages(fields: RecordFields) -> Conversation:
    """All messages; a system message at the front wins over the system column."""
    return read_messages(fields, is_system=_is_system, content=_content, message=_message)


def reply(fields: RecordFields, role: str) -> Message:
    """The chosen or rejected reply: a message as it stands in the conversation."""
    return read_reply(fields, role, _message)


def _is_system(fields: RecordFields, turn: Any) -> bool:
    return fields.turn_value(turn, "role") in ("system", "developer")


def _content(fields: RecordFields, turn: dict[str, Any]) -> str:
    return _text(fields, turn.get("content"))


def _message(fields: RecordFields, turn: dict[str, Any], place: int) -> Message:
    role = fields.turn_value(turn, "role")
    if role == "user":
        return Message("user", _content(fields, turn))
    if role in ("tool", "function"):
        call_id = fields.as_text(turn.get("tool_call_id") or "", "tool_call_id")
        return Message("observation", _content(fields, turn), call_id=call_id)
    if role not in ("assistant", "function_call"):
        raise bad_role(role, place, _ROLES, is_system=place > 0 and role in ("system", "developer"))
    calls = turn.get("tool_calls") or []
    if not isinstance(calls, list):
        raise fields.wrong_type("tool_calls", "a list", calls)
    content = turn.get("content")
    text = "" if calls and content is None else _text(fields, content)
    reasoning = fields.as_text(turn.get("reasoning_content") or "", "reasoning_content")
    loss = _loss_weight(fields, turn)
    if not calls:
        return Message("function" if role == "function_call" else "assistant", text, reasoning, loss=loss)
    return Message("function", _calls(fields, calls), reasoning, preface=text, loss=loss)


def _text(fields: RecordFields, content: Any) -> str:
    if not isinstance(content, list):
        return fields.as_text(content, "content")
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise fields.wrong_type("content", "parts of type text", part)
        parts.append(fields.as_text(part.get("text", part.get("value")), "content"))
    return "".join(parts)


def _calls(fields: RecordFields, calls: list[Any]) -> str:
    """Tool calls as the JSON text of a function turn, with the ids that results name."""
    plain = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            raise fields.wrong_type("tool_calls", "calls with a function name", call)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            # Text that is no JSON is kept: what the model wrote is what it is trained on.
            with contextlib.suppress(json.JSONDecodeError, RecursionError):
                arguments = json.loads(arguments)
        given_id = {"id": call["id"]} if call.get("id") else {}
        plain.append({**given_id, "name": function["name"], "arguments": arguments})
    return json.dumps(plain, ensure_ascii=False)


def _loss_weight(fields: RecordFields, turn: dict[str, Any]) -> bool:
    weight = turn.get("loss_weight", 1)
    if weight not in (0, 1):
        raise fields.wrong_type("loss_weight", "0 or 1", weight)
    return bool(weight)
