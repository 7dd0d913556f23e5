"""Conversations that are too long for their last reply: the earliest turns are left out."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from mindspeed_llm.tasks.preprocess.layouts.base import has_question
from mindspeed_llm.tasks.preprocess.records import SOURCE_ROLES, Conversation, Message

Rendered = TypeVar("Rendered")


def shortened(
    conversation: Conversation,
    rendered: Rendered,
    render: Callable[[Conversation], Rendered],
    fits: Callable[[Rendered], bool],
) -> Rendered:
    """`rendered` where it fits, else the rendering of the conversation without as few of its earliest turns as fits.

    System text and tools stay, and what begins a conversation does, since what is left is rendered as a conversation of
    its own. It begins with a question of the user, never with the result of a call that was left out. Where not even
    the last question fits, its rendering is returned all the same.
    """
    if fits(rendered):
        return rendered
    starts = _questions(conversation.messages)
    low, high = 1, len(starts) - 1
    if high < low:
        return rendered

    def rendered_from(number: int) -> Rendered:
        return render(replace(conversation, messages=conversation.messages[starts[number] :]))

    # A shorter conversation is a shorter rendering: bisected, so that long ones are not rendered once per turn.
    best = None
    while low < high:
        middle = (low + high) // 2
        tried = rendered_from(middle)
        if fits(tried):
            best, high = tried, middle
        else:
            low = middle + 1
    return rendered_from(low) if best is None else best


def _questions(messages: Sequence[Message]) -> list[int]:
    """Where a conversation may begin: at its beginning, and at later messages in which the user asks."""
    return [
        index
        for index, message in enumerate(messages)
        if index == 0 or (message.role in SOURCE_ROLES and has_question([message]))
    ]
