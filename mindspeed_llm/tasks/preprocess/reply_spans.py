"""Where the replies lie in the text of a chat template, proven from the template itself.

A reply begins where the prompt that the model would see ends: the rendering of the messages before it, with the
generation prompt, when that is a prefix of the whole. It ends where the rendering that has it as the last message
ends, when that is a prefix of the whole. Templates that write earlier turns in another way once later ones follow
(those of reasoning models leave the old thoughts out) break one prefix or the other. Then a part of the reply that
the template copies is exchanged for a mark, once in the whole and once in the conversation that ends with the reply:

    whole:       <...>|im_start|>assistant\\nMARK<|im_end|>\\n<|im_start|>user...
    until reply: <...>|im_start|>assistant\\n<think>\\n\\n</think>\\n\\nMARK<|im_end|>\\n

What stands in front of the mark in the whole is where the text of the reply begins, and what follows the mark in the
second is the reply's end, which must stand behind the mark in the whole too. Nothing is searched for in the text.
"""

from collections.abc import Callable, Iterator
from typing import Any

THOUGHT_FIELDS = ("reasoning_content", "thinking")
"""Keys of a message that hold its thought."""

Messages = list[dict[str, Any]]
Render = Callable[..., str]
"""render(messages, generation_prompt=False, defaults=False) -> text; `defaults` leaves out the user's variables."""

# Words that no conversation holds. Two of them: what surrounds a mark must not depend on which it is.
MARKS = ("Mark7Qz1wXy", "OtherMark4Kv9")


def reply_span(render: Render, text: str, messages: Messages, index: int) -> tuple[int, int] | None:
    """Characters (begin, end) of the reply `messages[index]` in `text`, the rendering of all messages.

    The span is what the model writes: the reply and its end marker. None where it cannot be proven.
    """
    begin = _prompt_end(render, text, messages, index)
    until_reply = text if index == len(messages) - 1 else render(messages[: index + 1])
    end = len(until_reply) if text.startswith(until_reply) else None
    if begin is None:
        begin = _content_begin(render, text, messages, index)
    if end is None:
        end = _marked_end(render, text, messages, index)
    return (begin, end) if begin is not None and end is not None and begin <= end else None


def _prompt_end(render: Render, text: str, messages: Messages, index: int) -> int | None:
    # Variables such as enable_thinking may change the prompt for the next reply, and not how replies are shown.
    for defaults in (False, True):
        prompt = render(messages[:index], generation_prompt=True, defaults=defaults)
        if text.startswith(prompt):
            return len(prompt)
    return None


def _content_begin(render: Render, text: str, messages: Messages, index: int) -> int | None:
    """Where the text of the reply begins; what the template itself writes in front of it belongs to the prompt.

    A thought in a field of its own would stand in front of the text: where it is shown, nothing is proven.
    """
    reply = messages[index]
    shown = {**reply, **{key: MARKS[0] for key in THOUGHT_FIELDS if key in reply}}
    if not reply.get("content") or MARKS[0] in render([*messages[:index], shown, *messages[index + 1 :]]):
        return None
    around = _around(render, messages, index, _with_content)
    return len(around[0]) if around is not None and _fits(text, *around) else None


def _marked_end(render: Render, text: str, messages: Messages, index: int) -> int | None:
    for mark in _ways_to_mark(messages[index]):
        around = _around(render, messages, index, mark)
        alone = _around(render, messages[: index + 1], index, mark)
        if around is None or alone is None or not _fits(text, *around):
            continue
        rest, end_marker = around[1], alone[1]
        if rest.startswith(end_marker):
            return len(text) - len(rest) + len(end_marker)
    return None


Marking = Callable[[dict[str, Any], str], dict[str, Any]]


def _ways_to_mark(reply: dict[str, Any]) -> Iterator[Marking]:
    if reply.get("tool_calls"):
        yield _with_call_name
    elif reply.get("content"):
        yield _with_content


def _with_content(reply: dict[str, Any], mark: str) -> dict[str, Any]:
    return {**reply, "content": mark}


def _with_call_name(reply: dict[str, Any], mark: str) -> dict[str, Any]:
    *calls, last = reply["tool_calls"]
    return {**reply, "tool_calls": [*calls, {**last, "function": {**last["function"], "name": mark}}]}


def _around(render: Render, messages: Messages, index: int, mark_reply: Marking) -> tuple[str, str] | None:
    """Text (in front, behind) of a mark in the reply; None where the template does not copy that part once."""
    found = []
    for mark in MARKS:
        marked = [*messages[:index], mark_reply(messages[index], mark), *messages[index + 1 :]]
        parts = render(marked).split(mark)
        if len(parts) != 2:
            return None
        found.append((parts[0], parts[1]))
    return found[0] if found[0] == found[1] else None


def _fits(text: str, front: str, back: str) -> bool:
    return len(front) + len(back) <= len(text) and text.startswith(front) and text.endswith(back)
