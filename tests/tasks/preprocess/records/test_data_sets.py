"""Layouts of single data sets, by hand."""

from pathlib import Path

import pytest

from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.records import FORMATS, BadConversation, to_conversation


def _messages(formatting, data):
    conversation = to_conversation(Record(Path("f.json"), 1, data), formatting, FORMATS[formatting].columns, {})
    assert not conversation.system
    return [(message.role, message.content) for message in conversation.messages]


TWO_TURNS = [("user", "hi"), ("assistant", "Hello!"), ("user", "and?"), ("assistant", "all")]


@pytest.mark.parametrize(
    "instruction",
    [
        "Human:hi\nAssistant:Hello!\nHuman:and?\nAssistant:",
        "Human: hi\n\nAssistant: Hello!\n\nHuman: and?\nAssistant:\n",
        "Human: hi Assistant: Hello! Human: and? Assistant:",
        "Human:hiAssistant:Hello!Human:and?Assistant:",
    ],
)
def test_belle_turns(instruction):
    assert _messages("belle", {"instruction": instruction, "input": "", "output": "all"}) == TWO_TURNS


def test_belle_text_that_speaks_of_assistants_is_text():
    instruction = "Human: What does an AI Assistant: do?\nAssistant: It helps a Human: always.\nHuman: Why?\nAssistant:"
    assert _messages("belle", {"instruction": instruction, "output": "x"}) == [
        ("user", "What does an AI Assistant: do?"),
        ("assistant", "It helps a Human: always."),
        ("user", "Why?"),
        ("assistant", "x"),
    ]


def test_belle_without_marks_is_one_question():
    assert _messages("belle", {"instruction": "Why?", "output": "x"}) == [("user", "Why?"), ("assistant", "x")]


def test_belle_out_of_order():
    with pytest.raises(BadConversation, match="roles out of order"):
        _messages("belle", {"instruction": "Human: a\nHuman: b\nAssistant:", "output": "x"})


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("as_list", [True, False])
def test_moss_turns(marked, as_list):
    def turn(question, answer):
        if not marked:
            return {"Human": question, "MOSS": answer}
        return {"Human": f"<|Human|>: {question}<eoh>\n", "Commands": "None", "MOSS": f"<|MOSS|>: {answer}<eom>\n"}

    turns = [turn("hi", "Hello!"), None, turn("and?", "all")]
    chat = turns if as_list else {f"turn_{number}": item for number, item in enumerate(turns)}
    assert _messages("moss", {"chat": chat}) == TWO_TURNS


def test_leetcode():
    data = {"code_with_problem": "# Sum\nGiven x\n```python\npass```\n", "code_only": "c", "explanation_only": "e"}
    assert _messages("leetcode", data) == [("user", "# Sum\nGiven x"), ("assistant", "c\ne")]
