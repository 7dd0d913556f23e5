"""ShareGPT records: a list of messages whose keys and role names are given by tags."""

from typing import Any

from mindspeed_llm.tasks.preprocess.records.conversation import Conversation, Message, bad_role
from mindspeed_llm.tasks.preprocess.records.fields import RecordFields
from mindspeed_llm.tasks.preprocess.records.message_lists import read_messages, read_reply

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
    return read_messages(fields, is_system=_is_system, content=_content, message=_message)


def reply(fields: RecordFields, role: str) -> Message:
    """The chosen or rejected reply: a message as it stands in the conversation."""
    return read_reply(fields, role, _message)


def _is_system(fields: RecordFields, turn: Any) -> bool:
    return fields.turn_value(turn, str(fields.tags["role_tag"])) == fields.tags["system_tag"]


def _message(fields: RecordFields, turn: Any, place: int) -> Message:
    name = fields.turn_value(turn, str(fields.tags["role_tag"]))
    roles = {fields.tags[tag]: role for tag, role in _ROLES.items()}
    if not isinstance(name, str) or name not in roles:
        is_system = place > 0 and name is not None and name == fields.tags["system_tag"]
        known = [*roles, fields.tags["system_tag"]]
        raise bad_role(name, place, known, is_system=is_system, advice="; `tags` (in --map-keys) names others")
    return Message(roles[name], _content(fields, turn))


def _content(fields: RecordFields, turn: Any) -> str:
    key = str(fields.tags["content_tag"])
    return fields.as_text(fields.turn_value(turn, key), key)
