"""ShareGPT records: a list of messages whose keys and role names are given by tags."""

from typing import Any

from mindspeed_llm.tasks.preprocess.records.conversation import BadConversation, Conversation, Message
from mindspeed_llm.tasks.preprocess.records.fields import RecordFields

COLUMNS = {
    "messages": "conversations",
    "system": "system",
    "tools": "tools",
    "chosen": "chosen",
    "rejected": "rejected",
}

SHAREGPT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}

_ROLES = {
    "user_tag": "user",
    "observation_tag": "observation",
    "assistant_tag": "assistant",
    "function_tag": "function",
}


def messages(fields: RecordFields) -> Conversation:
    """All messages; a system message at the front wins over the system column."""
    system, found = fields.text("system"), []
    for position, turn in enumerate(fields.items("messages", required=True)):
        if position == 0 and fields.turn_value(turn, str(fields.tags["role_tag"])) == fields.tags["system_tag"]:
            system = _content(fields, turn)
        else:
            found.append(_message(fields, turn))
    return Conversation(found, system=system, tools=fields.tools())


def reply(fields: RecordFields, role: str) -> Message:
    """The chosen or rejected reply: a message as it stands in the conversation."""
    value = fields.value(role, required=True)
    if not isinstance(value, dict):
        raise fields.wrong_type(fields.column(role), "a message", value)
    return _message(fields, value)


def _message(fields: RecordFields, turn: Any) -> Message:
    name = fields.turn_value(turn, str(fields.tags["role_tag"]))
    roles = {fields.tags[tag]: role for tag, role in _ROLES.items()}
    if not isinstance(name, str) or name not in roles:
        raise BadConversation(f"unknown role {name!r}", "unknown role")
    return Message(roles[name], _content(fields, turn))


def _content(fields: RecordFields, turn: Any) -> str:
    key = str(fields.tags["content_tag"])
    return fields.as_text(fields.turn_value(turn, key), key)
