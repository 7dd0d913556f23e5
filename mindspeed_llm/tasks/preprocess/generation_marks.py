"""The tokens that a chat template marks as replies with {% generation %}, and which reply each stretch belongs to.

A template may mark a reply in parts, or not at all, so that stretches cannot be counted off against replies. Instead
every question and result is exchanged for a numbered mark. Where the marked stretches stay the same, a stretch belongs
to the reply whose questions stand in front of it and whose next questions stand behind it.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from mindspeed_llm.tasks.preprocess.reply_spans import MARKS

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = list[dict[str, Any]]
Stretch = tuple[int, int]
"""(first, behind the last) token that is marked."""


def stretches(mask: Sequence[int]) -> list[Stretch]:
    """The stretches of marked tokens."""
    found: list[Stretch] = []
    begin = None
    for position, marked in enumerate([*mask, 0]):
        if marked and begin is None:
            begin = position
        elif not marked and begin is not None:
            found.append((begin, position))
            begin = None
    return found


def with_marked_sources(messages: Messages) -> tuple[Messages, list[list[str]]]:
    """The messages with a mark as the text of each source; and the marks in front of each reply, at last those that no
    reply follows.
    """
    marked: Messages = []
    marks: list[list[str]] = [[]]
    number = 0
    for message in messages:
        if message["role"] in ("user", "tool"):
            number += 1
            marks[-1].append(f"{MARKS[0]}{number}X")
            message = {**message, "content": marks[-1][-1]}
        elif message["role"] == "assistant":
            marks.append([])
        marked.append(message)
    return marked, marks


def owners(text: str, spans: Sequence[tuple[int, int]], marks: Sequence[Sequence[str]]) -> list[int] | None:
    """The number of the reply that each span of characters belongs to; None where that cannot be proven.

    `text` is the rendering of messages and marks of `with_marked_sources`.
    """
    if any(text.count(mark) != 1 for group in marks for mark in group) or not all(marks[:-1]):
        return None
    begins = [min(text.index(mark) for mark in group) for group in marks if group]
    ends = [max(text.index(mark) + len(mark) for mark in group) for group in marks if group]
    found = []
    for begin, end in spans:
        owner = sum(place <= begin for place in ends) - 1
        is_before_next = owner + 1 >= len(begins) or end <= begins[owner + 1]
        if not 0 <= owner < len(marks) - 1 or not is_before_next or any(place > begin for place in ends[: owner + 1]):
            return None
        found.append(owner)
    return found


def end_mark(ids: Sequence[int], is_special: Callable[[int], bool], decode: Callable[[list[int]], str]) -> list[int]:
    """The first of the ids up to a special token, with nothing but white space before it; empty where there is none."""
    for position, token in enumerate(ids):
        if is_special(token):
            return list(ids[: position + 1])
        if decode([token]).strip():
            break
    return []
