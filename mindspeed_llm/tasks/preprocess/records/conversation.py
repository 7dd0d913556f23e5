"""What every record becomes: messages in order, with the system text and the tools."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
    """Messages in order (source turns and replies alternate), with the system text and the tools as JSON text.

    `first_place` is the number of the first message in the record, counted from 1: 2 behind a system message.
    """

    messages: list[Message]
    system: str = ""
    tools: str = ""
    first_place: int = field(default=1, compare=False)


def bad_role(
    name: Any, place: int, known: Sequence[str | None], *, is_system: bool, advice: str = ""
) -> BadConversation:
    """The error for a message whose role cannot stand there; `place` is its number in the record, 0 for one that stands
    in a column of its own.
    """
    which = f"message {place}" if place else "a reply"
    if is_system:
        kind = "system message that is not the first"
        return BadConversation(f"{kind}: {which} is of {name!r}; put its text in the first, or in the user's", kind)
    names = ", ".join(str(role) for role in known)
    return BadConversation(f"unknown role {name!r} of {which}; known are {names}{advice}", "unknown role")


def check_order(messages: Sequence[Message], *, ends_with_reply: bool, first_place: int = 1) -> None:
    """Check that sources and replies alternate from a source on, and which of them comes last.

    Raises BadConversation where they do not, UnusableRecord where a user turn has no text.
    """
    if not messages:
        raise BadConversation("conversation without messages")
    previous = "assistant"
    for place, message in enumerate(messages, start=first_place):
        is_source = message.role in SOURCE_ROLES
        # Results of parallel tool calls come as several observations in a row.
        several_results = message.role == "observation" and previous == "observation"
        if is_source != (previous in TARGET_ROLES) and not several_results:
            before = "is the first" if place == first_place else f"follows one of {previous}"
            wanted = " or ".join(SOURCE_ROLES if previous in TARGET_ROLES else TARGET_ROLES)
            raise BadConversation(
                f"roles out of order: message {place} is of {message.role} and {before}, where one of {wanted} belongs",
                "roles out of order",
            )
        previous = message.role
    if (previous in TARGET_ROLES) != ends_with_reply:
        kind = f"conversation does not end with a {'reply' if ends_with_reply else 'question'}"
        raise BadConversation(f"{kind}: its last message, {place}, is of {previous}", kind)
    if any(message.role == "user" and not message.content.strip() for message in messages):
        raise UnusableRecord(EMPTY_PROMPT)
