"""Layouts of single public data sets: BELLE's multi-turn chats, MOSS, and LeetCode solutions."""

import re

from mindspeed_llm.tasks.preprocess.records.conversation import Conversation, Message
from mindspeed_llm.tasks.preprocess.records.fields import RecordFields

BELLE_COLUMNS = {"prompt": "instruction", "response": "output"}
MOSS_COLUMNS = {"messages": "chat"}
LEETCODE_COLUMNS = {"problem": "code_with_problem", "code": "code_only", "explanation": "explanation_only"}

_BELLE_ROLES = {"Human": "user", "Assistant": "assistant"}
_LINE_MARKS = re.compile(r"^[ \t]*(Human|Assistant):", re.MULTILINE)
_ANY_MARKS = re.compile(r"(Human|Assistant):")
_MOSS_MARKS = re.compile(r"^\s*<\|(?:Human|MOSS)\|>:|<eo[hm]>\s*$")


def belle(fields: RecordFields) -> Conversation:
    """BELLE's multi-turn chats: the instruction holds all turns, each behind "Human:" or "Assistant:", and ends with an
    open "Assistant:"; the output is the last reply.

    Marks count at the beginning of a line, so that text may speak of humans and assistants; where the whole chat stands
    in one line they count everywhere. An instruction without marks is one question.
    """
    text = fields.text("prompt", required=True)
    for marks in (_LINE_MARKS, _ANY_MARKS):
        # Text in front of the first mark, then mark and text by turns.
        before, *parts = marks.split(text)
        if parts and not before.strip() and parts[-2:] and parts[-2] == "Assistant" and not parts[-1].strip():
            names, texts = parts[:-2:2], parts[1:-2:2]
            turns = zip(names, texts, strict=True)
            return Conversation([Message(_BELLE_ROLES[name], content.strip()) for name, content in turns])
    return Conversation([Message("user", text.strip())])


def moss(fields: RecordFields) -> Conversation:
    """MOSS: turns of a question (key Human) and a reply (key MOSS), an object turn_1, turn_2, .. or a list."""
    chat = fields.value("messages", required=True)
    if not isinstance(chat, dict | list):
        raise fields.wrong_type(fields.column("messages"), "turns with the keys Human and MOSS", chat)
    found = []
    # Readers of columnar files fill absent turns with null.
    for turn in filter(None, chat.values() if isinstance(chat, dict) else chat):
        for key, role in (("Human", "user"), ("MOSS", "assistant")):
            text = fields.as_text(fields.turn_value(turn, key), key)
            found.append(Message(role, _MOSS_MARKS.sub("", text).strip()))
    return Conversation(found)


def leetcode(fields: RecordFields) -> Conversation:
    """LeetCode solutions: the problem is the text in front of the code, the reply is the code and its explanation."""
    problem = fields.text("problem", required=True).split("```", maxsplit=1)[0].strip()
    parts = [fields.text(role, required=True) for role in ("code", "explanation")]
    return Conversation([Message("user", problem), Message("assistant", "\n".join(parts))])
