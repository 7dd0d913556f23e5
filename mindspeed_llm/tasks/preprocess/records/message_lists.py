"""What record formats with a list of messages have in common, whatever the keys of a message are called."""

from collections.abc import Callable
from typing import Any

from mindspeed_llm.tasks.preprocess.records.conversation import Conversation, Message
from mindspeed_llm.tasks.preprocess.records.fields import RecordFields

ReadMessage = Callable[[RecordFields, Any, int], Message]
"""(fields, the message, its number in the record counted from 1; 0 for one that stands alone) -> the message read."""


def read_messages(
    fields: RecordFields,
    *,
    is_system: Callable[[RecordFields, Any], bool],
    content: Callable[[RecordFields, Any], str],
    message: ReadMessage,
) -> Conversation:
    """All messages; a system message at the front wins over the system column."""
    system, found, turns = fields.text("system"), [], fields.items("messages", required=True)
    for position, turn in enumerate(turns):
        if position == 0 and is_system(fields, turn):
            system = content(fields, turn)
        else:
            found.append(message(fields, turn, position + 1))
    place = len(turns) - len(found) + 1
    return Conversation(found, system=system, tools=fields.tools(), first_place=place)


def read_reply(fields: RecordFields, role: str, message: ReadMessage) -> Message:
    """The chosen or rejected reply: a message as it stands in the conversation."""
    value = fields.value(role, required=True)
    if not isinstance(value, dict):
        raise fields.wrong_type(fields.column(role), "a message", value)
    return message(fields, value, 0)
