"""Records of the three formats become the same conversation; bad records say what is wrong and where."""

from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.records import (
    FORMATS,
    SHAREGPT_TAGS,
    Conversation,
    Message,
    UnusableRecord,
    to_conversation,
)


def convert(formatting, data, **columns):
    record = Record(Path("f.json"), 7, data)
    return to_conversation(record, formatting, {**FORMATS[formatting].columns, **columns}, SHAREGPT_TAGS)


def turns(*contents):
    return [Message(role, content) for role, content in zip(["user", "assistant"] * 9, contents, strict=False)]


def test_the_formats_agree():
    expected = Conversation(turns("a", "b", "c\nd", "e"), system="sys")
    alpaca = {"instruction": "c", "input": "d", "output": "e", "history": [["a", "b"]], "system": "sys"}
    sharegpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    sharegpt += [{"from": "human", "value": "c\nd"}, {"from": "gpt", "value": "e"}]
    openai = [{"role": "system", "content": "sys"}, {"role": "user", "content": "a"}]
    openai += [{"role": "assistant", "content": "b"}, {"role": "user", "content": [{"type": "text", "text": "c\nd"}]}]
    openai += [{"role": "assistant", "content": "e"}]
    assert convert("alpaca", alpaca) == expected
    assert convert("sharegpt", {"conversations": sharegpt, "system": "sys"}) == expected
    assert convert("openai", {"messages": openai}) == expected


def test_leading_system_message_wins_over_the_column():
    messages = [{"from": "system", "value": "first"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert convert("sharegpt", {"conversations": messages, "system": "column"}).system == "first"


def test_alpaca_without_optional_columns_and_with_empty_answer():
    assert convert("alpaca", {"instruction": "q", "output": ""}).messages == turns("q", "")
    assert convert("alpaca", {"instruction": None, "input": "q", "output": "a"}).messages == turns("q", "a")
    mapped = convert("alpaca", {"q": "ask", "r": "say"}, prompt="q", response="r", query=None)
    assert mapped.messages == turns("ask", "say")


def test_openai_tool_calls_reasoning_and_loss_weight():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    messages = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "let me see",
            "tool_calls": [call | {"id": "a"}, call],
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "2", "tool_call_id": "b"},
        {"role": "assistant", "content": "done", "loss_weight": 0},
    ]
    calls = '[{"id": "a", "name": "f", "arguments": {"x": "é"}}, {"name": "f", "arguments": {"x": "é"}}]'
    assert convert("openai", {"messages": messages}).messages == [
        Message("user", "q"),
        Message("function", calls, reasoning="hm", preface="let me see"),
        Message("observation", "1", call_id="a"),
        Message("observation", "2", call_id="b"),
        Message("assistant", "done", loss=False),
    ]


@pytest.mark.parametrize(
    ("formatting", "data", "message"),
    [
        ("alpaca", {"instruction": "q"}, r"f\.json:7: the record has no key 'output' .* it has \['instruction'\]"),
        ("alpaca", {"output": "a"}, r"no key 'instruction'"),
        ("alpaca", {"instruction": "q", "output": None}, r"f\.json:7: key 'output': expected text, found null"),
        ("alpaca", {"instruction": "q", "output": 3}, r"expected text, found int 3"),
        ("alpaca", {"instruction": ["q"], "output": "a"}, r"expected text, found list"),
        ("alpaca", {"instruction": "q", "output": "a", "history": [["x"]]}, r"key 'history': expected pairs"),
        ("sharegpt", {"conversations": "text"}, r"key 'conversations': expected a list, found str"),
        ("sharegpt", {"conversations": [{"role": "user"}]}, r"a message has no key 'from'"),
        ("sharegpt", {"conversations": [{"from": "human", "value": 1}]}, r"key 'value': expected text, found int"),
        ("openai", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"expected parts of type text"),
        (
            "openai",
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "loss_weight": 0.5}]},
            r"key 'loss_weight': expected 0 or 1",
        ),
    ],
)
def test_wrong_structure_is_an_error_with_file_line_and_key(formatting, data, message):
    with pytest.raises(UserError, match=message):
        convert(formatting, data)


def _sharegpt(*roles):
    return {"conversations": [{"from": role, "value": "x"} for role in roles]}


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        ((), "conversation without messages"),
        (("human",), "does not end with a reply"),
        (("gpt", "human", "gpt"), "roles out of order"),
        (("human", "human", "gpt"), "roles out of order"),
        (("human", "gpt", "gpt"), "roles out of order"),
        (("human", "gpt", "observation"), "does not end with a reply"),
        (("human", "bot"), "unknown role 'bot'"),
    ],
)
def test_conversations_that_cannot_be_trained_on(roles, reason):
    with pytest.raises(UnusableRecord, match=reason):
        convert("sharegpt", _sharegpt(*roles))


def test_empty_prompt_cannot_be_trained_on():
    with pytest.raises(UnusableRecord, match="empty prompt"):
        convert("alpaca", {"instruction": " ", "input": "", "output": "a"})
