"""Records of all formats become the same conversations, pairs and prompts; bad records say what is wrong and where."""

from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.records import (
    FORMATS,
    SHAREGPT_TAGS,
    BadConversation,
    BadRecord,
    Conversation,
    Message,
    Preference,
    Prompt,
    UnusableRecord,
    to_conversation,
    to_preference,
    to_prompt,
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


def test_openai_roles_that_cannot_stand_there():
    def record(*roles):
        return {"messages": [{"role": role, "content": "x"} for role in roles]}

    known = "system, developer, user, assistant, tool, function, function_call"
    with pytest.raises(UnusableRecord, match=rf"unknown role 'bot' of message 2; known are {known}$"):
        convert("openai", record("user", "bot"))
    with pytest.raises(UnusableRecord, match="system message that is not the first: message 3 is of 'developer'"):
        convert("openai", record("system", "user", "developer", "assistant"))
    with pytest.raises(UnusableRecord, match=r"roles out of order: message 3 is of tool|message 3 is of observation"):
        convert("openai", record("system", "user", "tool"))


def test_empty_prompt_cannot_be_trained_on():
    with pytest.raises(UnusableRecord, match="empty prompt"):
        convert("alpaca", {"instruction": " ", "input": "", "output": "a"})


def _record(data):
    return Record(Path("f.json"), 7, data)


def _named(formatting, *texts):
    """Messages of the format with the texts, questions and replies by turns."""
    names, keys = {
        "sharegpt": (("human", "gpt"), ("from", "value")),
        "openai": (("user", "assistant"), ("role", "content")),
    }[formatting]
    return [dict(zip(keys, (names[i % 2], text), strict=True)) for i, text in enumerate(texts)]


def _formatted(formatting, *texts, **rest):
    """A record of the format with the texts as messages; alpaca's last question stands alone."""
    if formatting == "alpaca":
        return {
            "instruction": texts[-1],
            "history": [list(texts[i : i + 2]) for i in range(0, len(texts) - 1, 2)],
        } | rest
    return {FORMATS[formatting].columns["messages"]: _named(formatting, *texts)} | rest


@pytest.mark.parametrize("formatting", ["alpaca", "sharegpt", "openai"])
def test_preference_pairs(formatting):
    replies = {"chosen": "good", "rejected": "bad"}
    if formatting != "alpaca":
        replies = {key: _named(formatting, "", text)[1] for key, text in replies.items()}
    data = _formatted(formatting, "a", "b", "c", system="sys", **replies)
    pair = to_preference(_record(data), formatting, FORMATS[formatting].columns, SHAREGPT_TAGS)
    prompt = Conversation(turns("a", "b", "c"), system="sys")
    assert pair == Preference(prompt, Message("assistant", "good"), Message("assistant", "bad"))


@pytest.mark.parametrize("formatting", ["alpaca", "sharegpt", "openai"])
@pytest.mark.parametrize("answered", [True, False])
def test_prompts(formatting, answered):
    data = _formatted(formatting, "a", "b", "c", *(["d"] if answered and formatting != "alpaca" else []))
    if answered and formatting == "alpaca":
        data["output"] = "d"
    prompt = to_prompt(_record(data), formatting, FORMATS[formatting].columns, SHAREGPT_TAGS, answer_required=False)
    assert prompt == Prompt(Conversation(turns("a", "b", "c")), Message("assistant", "d") if answered else None)
    if not answered:
        with pytest.raises((BadRecord, BadConversation), match=r"no key 'output'|does not end with a reply"):
            to_prompt(_record(data), formatting, FORMATS[formatting].columns, SHAREGPT_TAGS, answer_required=True)


def test_replies_in_lists():
    def replies(chosen, rejected, one_column=False):
        columns = {**FORMATS["alpaca"].columns, "rejected": "chosen" if one_column else "rejected"}
        data = {"instruction": "q", "chosen": chosen, "rejected": rejected}
        pair = to_preference(_record(data), "alpaca", columns, {})
        return pair.chosen.content, pair.rejected.content

    assert replies(["good"], ["bad"]) == replies("good", "bad") == ("good", "bad")
    assert replies(["good", "bad"], None, one_column=True) == ("good", "bad")
    with pytest.raises(BadRecord, match="key 'rejected': expected text, or a list of one text"):
        replies(["good"], ["bad", "worse"])
    with pytest.raises(BadRecord, match=r"key 'chosen': expected a list \[chosen, rejected\]"):
        replies(["good"], None, one_column=True)


def test_calls_may_be_chosen():
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
    data = {"conversations": _named("sharegpt", "a"), "chosen": call, "rejected": {"from": "gpt", "value": "no"}}
    pair = to_preference(_record(data), "sharegpt", FORMATS["sharegpt"].columns, SHAREGPT_TAGS)
    assert (pair.chosen.role, pair.rejected.role) == ("function", "assistant")


def test_tags_of_other_names():
    tags = {**SHAREGPT_TAGS, "role_tag": "who", "content_tag": "says", "user_tag": "U", "assistant_tag": "A"}
    data = {"talk": [{"who": "U", "says": "a"}, {"who": "A", "says": "b"}]}
    columns = {**FORMATS["sharegpt"].columns, "messages": "talk"}
    assert to_conversation(_record(data), "sharegpt", columns, tags).messages == turns("a", "b")


def test_mistakes_are_told_apart_by_kind():
    kinds = []
    for data in ({"instruction": "q"}, {"instruction": "q", "output": 3}, {"instruction": "q", "output": 4}):
        with pytest.raises(BadRecord) as caught:
            convert("alpaca", data)
        kinds.append(caught.value.kind)
    assert kinds == ["missing key 'output'", *["key 'output' is not text"] * 2]
