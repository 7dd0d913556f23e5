"""Where the replies lie in the text of a chat template, proven from the template itself.

A reply begins where the prompt that the model would see ends: the rendering of the messages before it, with the
generation prompt, when that is a prefix of the whole. It ends where the rendering that has it as the last message
ends, when that is a prefix of the whole. Templates that write earlier turns in another way once later ones follow
(those of reasoning models leave the old thoughts out) break one prefix or the other. Then the text of a message that
the template copies is exchanged for a mark, once in the whole and once in the part of the conversation that ends
there:

    whole:       <...>|im_start|>assistant\\nMARK<|im_end|>\\n<|im_start|>user...
    until reply: <...>|im_start|>assistant\\n<think>\\n\\n</think>\\n\\nMARK<|im_end|>\\n

What follows the mark in the part must follow it in the whole too: there the reply ends. In the same way it begins
where a prompt with a mark in the question ends. Nothing is searched for in the text.
"""

from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]
Render = Callable[..., str]
"""render(messages, generation_prompt=False, defaults=False) -> text; `defaults` leaves out the user's variables."""

THOUGHT_FIELDS = ("reasoning_content", "thinking")
"""Keys of a message that hold its thought."""

# Words that no conversation holds. Two of them: what surrounds a mark must not depend on which it is.
MARKS = ("Mark7Qz1wXy", "OtherMark4Kv9")


def reply_span(render: Render, text: str, messages: Messages, index: int) -> tuple[int, int] | None:
    """Characters (begin, end) of the reply `messages[index]` in `text`, the rendering of all messages.

    The span is what the model writes: the reply and its end marker. None where it cannot be proven.
    """
    begin = _begin(render, text, messages, index)
    end = _end(render, text, messages, index)
    return (begin, end) if begin is not None and end is not None and begin <= end else None


def _begin(render: Render, text: str, messages: Messages, index: int) -> int | None:
    # Variables such as enable_thinking may change the prompt for the next reply, and not how replies are shown.
    for defaults in (False, True):

        def render_prompt(some: Messages, defaults: bool = defaults) -> str:
            return render(some[:index], generation_prompt=True, defaults=defaults)

        found = _where_part_ends(render, text, messages, index - 1, render_prompt)
        if found is not None:
            return found
    return _content_begin(render, text, messages, index)


def _content_begin(render: Render, text: str, messages: Messages, index: int) -> int | None:
    """Where the text of the reply begins; what the template itself writes in front of it belongs to the prompt.

    A thought in a field of its own would stand in front of the text: where it is shown, nothing is proven.
    """
    reply = messages[index]
    if not reply.get("content"):
        return None
    marked = {**reply, **{key: MARKS[0] for key in THOUGHT_FIELDS if key in reply}}
    if MARKS[0] in render(_exchanged(messages, index, marked)):
        return None
    around = _around(render, messages, index)
    return len(around[0]) if around is not None and _fits(text, *around) else None


def _end(render: Render, text: str, messages: Messages, index: int) -> int | None:
    if index == len(messages) - 1:
        return len(text)
    return _where_part_ends(render, text, messages, index, lambda some: render(some[: index + 1]))


def _where_part_ends(
    render: Render, text: str, messages: Messages, index: int, render_part: Callable[[Messages], str]
) -> int | None:
    """Where the rendering of the first messages, the last of which is `index`, ends in the text of all."""
    part = render_part(messages)
    if text.startswith(part):
        return len(part)
    in_whole, in_part = _around(render, messages, index), _around(render_part, messages, index)
    if in_whole is None or in_part is None or not _fits(text, *in_whole):
        return None
    rest, part_end = in_whole[1], in_part[1]
    return len(text) - len(rest) + len(part_end) if rest.startswith(part_end) else None


def _around(render: Callable[[Messages], str], messages: Messages, index: int) -> tuple[str, str] | None:
    """Text (in front, behind) of a mark in the message; None where the template does not copy that part just once."""
    found = []
    for mark in MARKS:
        parts = render(_exchanged(messages, index, _marked(messages[index], mark))).split(mark)
        if len(parts) != 2:
            return None
        found.append((parts[0], parts[1]))
    return found[0] if found[0] == found[1] else None


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """The message with a mark in the last part of it that a template copies: the name of its last call, or its text."""
    if not message.get("tool_calls"):
        return {**message, "content": mark}
    *calls, last = message["tool_calls"]
    return {**message, "tool_calls": [*calls, {**last, "function": {**last["function"], "name": mark}}]}


def _exchanged(messages: Messages, index: int, message: dict[str, Any]) -> Messages:
    return [*messages[:index], message, *messages[index + 1 :]]


def _fits(text: str, front: str, back: str) -> bool:
    return len(front) + len(back) <= len(text) and text.startswith(front) and text.endswith(back)
