"""What every record becomes: messages in order, with the system text and the tools."""

from collections.abc import Sequence
from dataclasses import dataclass

SOURCE_ROLES = ("user", "observation")
TARGET_ROLES = ("assistant", "function")

EMPTY_PROMPT = "empty prompt"


class UnusableRecord(Exception):
    """A record without a trainable conversation. `kind` is the reason without what only this record holds, to count
    records by.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        # Not among the arguments, so that it travels between processes with its attributes.
        self.kind = kind or message


class BadConversation(UnusableRecord):
    """A record whose messages cannot be a conversation: roles that are unknown or out of order, no reply at the end."""


@dataclass(frozen=True)
class Message:
    """One turn. `role` is user, observation (a tool's answer), assistant or function (tool calls as JSON text).

    `reasoning` is thought text that came in a field of its own, `preface` is text in front of tool calls; `loss` False
    keeps a reply out of the loss. `call_id` is the id of the call that an observation answers, '' where the record
    names none; the ids of the calls stand in the JSON text of the function turn.
    """

    role: str
    content: str
    reasoning: str = ""
    preface: str = ""
    loss: bool = True
    call_id: str = ""


@dataclass(frozen=True)
class Conversation:
    """Messages in order (source turns and replies alternate), with the system text and the tools as JSON text."""

    messages: list[Message]
    system: str = ""
    tools: str = ""


def check_order(messages: Sequence[Message], *, ends_with_reply: bool) -> None:
    """Check that sources and replies alternate from a source on, and which of them comes last.

    Raises BadConversation where they do not, UnusableRecord where a user turn has no text.
    """
    if not messages:
        raise BadConversation("conversation without messages")
    previous = "assistant"
    for message in messages:
        is_source = message.role in SOURCE_ROLES
        # Results of parallel tool calls come as several observations in a row.
        several_results = message.role == "observation" and previous == "observation"
        if is_source != (previous in TARGET_ROLES) and not several_results:
            raise BadConversation("roles out of order")
        previous = message.role
    if (previous in TARGET_ROLES) != ends_with_reply:
        raise BadConversation(f"conversation does not end with a {'reply' if ends_with_reply else 'question'}")
    if any(message.role == "user" and not message.content.strip() for message in messages):
        raise UnusableRecord(EMPTY_PROMPT)
