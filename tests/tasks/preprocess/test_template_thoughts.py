"""Thoughts by the rules of enable_thinking, efforts and prompts, as text written by hand from the formats' rules."""

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from tests.tasks.preprocess.renderings import EMPTY_THOUGHT as EMPTY
from tests.tasks.preprocess.renderings import chat, render

Q, A = Message("user", "q"), Message("assistant", "a")

THOUGHT = "<think>\nT\n</think>\n\n"
OPEN_GLM, OPEN_LING = "\n<think>T</think>", "\n<think>\nT\n</think>\n\n"
NO_GLM = "\n<think></think>"

# (source end of turn 1, target of turn 1, source end of turn 2, target of turn 2) for replies "<think>T</think>a" and
# "b", and for "a" and "<think>T</think>b".
RULES = [
    ("qwen3", True, ("", "a", "", f"{EMPTY}b"), ("", "a", "", f"{THOUGHT}b")),
    ("qwen3", False, ("", "a", EMPTY, "b"), ("", "a", EMPTY, "b")),
    ("qwen3", None, ("", "a", EMPTY, "b"), ("", "a", "", f"{THOUGHT}b")),
    ("qwen3_legacy", True, ("", f"{THOUGHT}a", "", f"{EMPTY}b"), ("", f"{EMPTY}a", "", f"{THOUGHT}b")),
    ("qwen3_legacy", False, (EMPTY, "a", EMPTY, "b"), (EMPTY, "a", EMPTY, "b")),
    ("qwen3_legacy", None, ("", f"{THOUGHT}a", EMPTY, "b"), (EMPTY, "a", "", f"{THOUGHT}b")),
    ("glm4_moe", True, ("", f"{NO_GLM}\na", "", f"{NO_GLM}\nb"), ("", f"{NO_GLM}\na", "", f"{OPEN_GLM}\nb")),
    ("glm4_moe", False, (NO_GLM, "\na", NO_GLM, "\nb"), (NO_GLM, "\na", NO_GLM, "\nb")),
    ("glm4_moe", None, (NO_GLM, "\na", NO_GLM, "\nb"), (NO_GLM, "\na", "", f"{OPEN_GLM}\nb")),
    ("glm4_moe_legacy", True, ("", f"\n{THOUGHT}a", "", f"{EMPTY}\nb"), ("", f"{EMPTY}\na", "", f"\n{THOUGHT}b")),
    ("glm4_moe_legacy", False, (EMPTY, "\na", EMPTY, "\nb"), (EMPTY, "\na", EMPTY, "\nb")),
    ("glm4_moe_legacy", None, ("", f"\n{THOUGHT}a", EMPTY, "\nb"), (EMPTY, "\na", "", f"\n{THOUGHT}b")),
    ("magistral", True, ("", f"{THOUGHT}a", "", f"{EMPTY}b"), ("", f"{EMPTY}a", "", f"{THOUGHT}b")),
    ("magistral", False, (EMPTY, "a", EMPTY, "b"), (EMPTY, "a", EMPTY, "b")),
    ("bailing_mini", True, ("", "a", "", "b"), ("", "a", "", f"{OPEN_LING}b")),
    ("bailing_mini", False, ("", "a", "", "b"), ("", "a", "", "b")),
    ("bailing_mini", None, ("", "a", "", "b"), ("", "a", "", f"{OPEN_LING}b")),
    ("deepseek4", True, ("</think>", "a", "<think>", "</think>b"), ("</think>", "a", "<think>", "T</think>b")),
    ("deepseek4", False, ("</think>", "a", "</think>", "b"), ("</think>", "a", "</think>", "b")),
    ("deepseek4", None, ("</think>", "a", "</think>", "b"), ("</think>", "a", "</think>", "b")),
    # A template of a model that does not reason keeps the tags as the text that they are.
    ("qwen", True, ("", f"{THOUGHT}a", "", "b"), ("", "a", "", f"{THOUGHT}b")),
    ("qwen", False, ("", f"{THOUGHT}a", "", "b"), ("", "a", "", f"{THOUGHT}b")),
]
OPENS = {
    "qwen": "assistant\n",
    "magistral": "[/INST]",
    "deepseek4": "<｜Assistant｜>",
    "bailing_mini": "ASSISTANT</role>",
}


@pytest.mark.parametrize("in_field", [False, True], ids=["text", "field"])
@pytest.mark.parametrize(("name", "enable_thinking", "first", "last"), RULES)
def test_thinking_rules(name, enable_thinking, first, last, in_field):
    for thoughtful, expected in enumerate((first, last)):
        replies = [Message("assistant", text) for text in "ab"]
        replies[thoughtful] = (
            Message("assistant", "ab"[thoughtful], reasoning="T")
            if in_field
            else Message("assistant", THOUGHT + "ab"[thoughtful])
        )
        conversation = Conversation([Q, replies[0], Message("user", "r"), replies[1]])
        parts = render(name, conversation, enable_thinking=enable_thinking).split("¦")
        opening = next((v for k, v in OPENS.items() if name.startswith(k)), "<|assistant|>")
        ends = {"qwen3": "<|im_end|>\n", "qwen": "<|im_end|>", "glm4_moe": "<|user|>", "bailing_mini": "<|role_end|>"}
        end = {"magistral": "</s>", "deepseek4": "<｜end▁of▁sentence｜>", "glm4_moe_legacy": ""}.get(
            name, ends.get(name.removesuffix("_legacy"))
        )
        shown = [parts[0].split(opening)[-1], parts[1], parts[2].split(opening)[-1], parts[3]]
        assert shown == [expected[0], expected[1] + end, expected[2], expected[3] + end]


@pytest.mark.parametrize("name", ["qwen3", "glm4_moe", "bailing_mini", "gpt_oss", "deepseek4"])
def test_thoughts_of_earlier_turns_can_be_kept(name):
    first = Message("assistant", "a", reasoning="old thought")
    conversation = Conversation([Q, first, Message("user", "r"), Message("assistant", "b", reasoning="new thought")])
    dropped, kept = (render(name, conversation, enable_thinking=True, drop_thinking=drop) for drop in (True, False))
    assert "old thought" not in dropped and "new thought" in dropped
    assert "old thought" in kept.split("¦")[1] and "new thought" in kept.split("¦")[3]


def test_glm_marks_questions_when_thinking_is_off():
    text = render("glm4_moe", chat("q", "a", "r/nothink", "b"), enable_thinking=False)
    assert "q/nothink<|assistant|>" in text and "r/nothink<|assistant|>" in text


@pytest.mark.parametrize(
    "content", ["<think>a</think>b<think>c</think>d", "say <think>a</think>b", "<think>a", "a</think>b</think>c"]
)
def test_think_tags_that_are_no_single_leading_thought_are_text(content):
    assert render("qwen3", chat("q", content)).endswith(f"{EMPTY}¦{content}<|im_end|>\n")


def test_gpt_oss_thoughts():
    """In channels, in tags or in a field: a message of channel analysis; calls that a final reply follows have none."""
    channels = "<|channel|>analysis<|message|>T<|end|><|start|>assistant<|channel|>final<|message|>a"
    expected = f"{channels}<|return|>"
    for reply in (
        Message("assistant", channels),
        Message("assistant", f"{THOUGHT}a"),
        Message("assistant", "a", reasoning="T"),
    ):
        assert render("gpt_oss", Conversation([Q, reply])).split("¦")[1] == expected
        off = render("gpt_oss", Conversation([Q, reply]), enable_thinking=False)
        assert off.split("¦")[1] == "<|channel|>final<|message|>a<|return|>"
    call = Message("function", '{"name": "f", "arguments": {}}', reasoning="T")
    shown = "<|channel|>analysis<|message|>T<|end|><|start|>assistant to=functions.f"
    assert render("gpt_oss", Conversation([Q, call])).split("¦")[1].startswith(shown)
    final = render("gpt_oss", Conversation([Q, call, Message("observation", "1"), A]))
    assert final.split("¦")[1].startswith(" to=functions.f")


def test_efforts():
    assert "Reasoning: high\n" in render("gpt_oss", chat("q", "a"), reasoning_effort="high")
    text = render("deepseek4", chat("q", "a", system="S"), enable_thinking=True, reasoning_effort="max")
    assert text.startswith("<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum with no shortcuts permitted.\n")
    assert "is left unchecked.\n\nS<｜User｜>q<｜Assistant｜><think>¦</think>a" in text
    plain = render("deepseek4", chat("q", "a"), enable_thinking=True)
    assert render("deepseek4", chat("q", "a"), enable_thinking=True, reasoning_effort="high") == plain
    with pytest.raises(UserError, match="needs --enable-thinking true with template 'deepseek4'"):
        render("deepseek4", chat("q", "a"), reasoning_effort="max")


@pytest.mark.parametrize(
    ("name", "enable_thinking", "end"),
    [
        ("qwen3", None, "assistant\n"),
        ("qwen3", True, "assistant\n"),
        ("qwen3", False, f"assistant\n{EMPTY}"),
        ("qwen3_legacy", False, f"assistant\n{EMPTY}"),
        ("glm4_moe", False, f"/nothink<|assistant|>{NO_GLM}"),
        ("glm4_moe", True, "<|assistant|>"),
        ("bailing_mini", False, "<role>ASSISTANT</role>"),
        ("gpt_oss", None, "<|start|>assistant"),
        ("deepseek4", True, "<｜Assistant｜><think>"),
        ("deepseek4", None, "<｜Assistant｜></think>"),
        ("llama2", None, " [/INST]"),
        ("empty", None, "r"),
    ],
)
def test_prompts_end_where_the_model_begins(name, enable_thinking, end):
    conversation = chat("q", f"{THOUGHT}a", "r")
    parts = render(name, conversation, one_turn=True, enable_thinking=enable_thinking).split("¦")
    assert parts[-1] == "" and parts[-2].endswith(end)
    # The thought of an earlier reply is left out of a prompt, in the legacy layouts too.
    assert ("T\n" in parts[1]) == (name in ("llama2", "empty"))
