"""Random conversations: text, ids and masks equal those that transformers gives for chat templates in jinja.

The jinja templates here are our own, small ones, of the formats that most models follow. They mark the replies with
{% generation %}, so that transformers says which tokens are the assistant's. The tokenizer's own template is rendered
with these marks and without them, where the replies are found by proof.
"""

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_llm.tasks.preprocess.chat_template import ChatTemplateRenderer
from mindspeed_llm.tasks.preprocess.layouts import slots, thoughts
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from mindspeed_llm.tasks.preprocess.render import TemplateRenderer
from mindspeed_llm.tasks.preprocess.samples import IGNORE_INDEX, SampleOptions, build_sample
from mindspeed_llm.tasks.preprocess.templates import SpecialToken, load_template, template_names
from tests.support.tokenizers import byte_tokenizer

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ '\\n\\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|eot_id|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}{% endif %}"
)
# Thoughts after the last question only, an empty one in a last reply without, results of tools in one user turn.
_QWEN3 = """
{%- set ns = namespace(question=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.question = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}
    {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
  {%- elif m.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' }}
    {%- generation %}
    {%- if loop.index0 > ns.question and (loop.last or m.reasoning_content) %}
      {{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
    {%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls or [] %}
      {{- '\n' if m.content or not loop.first else '' }}
      {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
      {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
    {%- endgeneration %}
  {%- else %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
_SPECIALS = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)

_TEXTS = st.text(max_size=10).filter(lambda text: "<" not in text) | st.sampled_from(
    ["谢谢 🙂", "a\n\nb", "{{content}} {{idx}} {{name}}", " x ", "\\n", "Human:", "1.", "<tool", "user\n"]
)
_WORDS = _TEXTS.filter(lambda text: text.strip("\n") == text != "")
_ARGUMENTS = st.dictionaries(st.sampled_from("xyz"), st.integers() | _TEXTS | st.booleans() | st.none(), max_size=2)
_CALLS = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from(["f", "g"]), "arguments": _ARGUMENTS}), min_size=1, max_size=3
)


@st.composite
def _plain(draw, replies=_TEXTS) -> Conversation:
    texts = draw(st.lists(st.tuples(_TEXTS.filter(bool), replies), min_size=1, max_size=4))
    messages = [Message(role, text) for turn in texts for role, text in zip(("user", "assistant"), turn, strict=True)]
    return Conversation(messages, system=draw(_TEXTS))


@st.composite
def _with_thoughts_and_tools(draw) -> Conversation:
    messages: list[Message] = []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(Message("user", draw(_WORDS)))
        for _ in range(draw(st.integers(0, 2))):
            calls = draw(_CALLS)
            thought, preface = draw(st.just("") | _WORDS), draw(st.just("") | _WORDS)
            messages.append(Message("function", json.dumps(calls), reasoning=thought, preface=preface))
            messages += [Message("observation", draw(_TEXTS)) for _ in calls]
        messages.append(Message("assistant", draw(_WORDS), reasoning=draw(st.just("") | _WORDS)))
    return Conversation(messages, system=draw(st.just("") | _WORDS))


def _for_transformers(conversation: Conversation) -> list[dict]:
    messages: list[dict] = [{"role": "system", "content": conversation.system}] if conversation.system else []
    for message in conversation.messages:
        role = {"observation": "tool", "function": "assistant"}.get(message.role, message.role)
        given = {"role": role, "content": message.content}
        if message.role == "function":
            calls = [{"type": "function", "function": call} for call in json.loads(message.content)]
            given |= {"content": message.preface, "tool_calls": calls}
        if message.reasoning:
            given["reasoning_content"] = message.reasoning
        messages.append(given)
    return messages


def _check(name: str, template: str, conversation: Conversation, **options) -> None:
    tokenizer = byte_tokenizer(_SPECIALS, chat_template=template)
    encoded = tokenizer.apply_chat_template(
        _for_transformers(conversation), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    theirs = list(encoded["input_ids"])
    marked = [token if mark else IGNORE_INDEX for token, mark in zip(theirs, encoded["assistant_masks"], strict=True)]
    unmarked = byte_tokenizer(_SPECIALS, chat_template=re.sub(r"\{%-? *(end)?generation *-?%\}", "", template))
    renderers = (
        TemplateRenderer(load_template(name), tokenizer, **options),
        ChatTemplateRenderer(tokenizer),
        ChatTemplateRenderer(unmarked),
    )
    for renderer in renderers:
        ids, labels = build_sample(renderer.turns(conversation), SampleOptions(100_000), renderer.efficient_eos_id)
        assert tokenizer.decode(ids) == tokenizer.decode(theirs)
        assert (ids.tolist(), labels.tolist()) == (theirs, marked)


_PLAIN = {"chatml": _CHATML, "llama3": _LLAMA3}


@pytest.mark.parametrize("name", _PLAIN)
@settings(max_examples=20, deadline=None)
@given(conversation=_plain())
def test_plain_conversations(name, conversation):
    _check(name, _PLAIN[name], conversation)


@settings(max_examples=80, deadline=None)
@given(conversation=_with_thoughts_and_tools())
def test_conversations_with_thoughts_and_tools(conversation):
    # With thinking on, an empty thought is the assistant's, as the template marks it.
    _check("qwen3", _QWEN3, conversation, enable_thinking=True)


_ONE = Conversation([Message("user", "q"), Message("assistant", "a"), Message("user", "r"), Message("assistant", "b")])
_CALL = Message("function", '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": 1}}]', preface="p")
_TOOLS = Conversation(
    [
        *(Message("user", "q"), Message("assistant", "a", reasoning="t"), Message("user", "r"), _CALL),
        *(Message("observation", "1"), Message("observation", "2"), Message("assistant", "b", reasoning="t")),
    ]
)


def _shorter_replies(monkeypatch):
    original = slots.SlotLayout.pieces

    def pieces(self, conversation, *, one_turn=False):
        for source, target, reply in original(self, conversation, one_turn=one_turn):
            yield source, [*target[:-1], *([target[-1][:-1]] if isinstance(target[-1], str) else [])], reply

    monkeypatch.setattr(slots.SlotLayout, "pieces", pieces)


def _lost_turn(monkeypatch):
    original = slots.split_turns
    monkeypatch.setattr(slots, "split_turns", lambda messages: original(messages)[:-1] or original(messages))


def _thoughts_in_history(monkeypatch):
    original = thoughts.Place
    monkeypatch.setattr(slots, "Place", lambda **place: original(**place | {"after_question": True}))


def _no_empty_thought(monkeypatch):
    original = thoughts.Place
    monkeypatch.setattr(slots, "Place", lambda **place: original(**place | {"is_last": False}))


def _lost_preface(monkeypatch):
    original = slots.reply_text

    def reply_text(*arguments):
        parts = original(*arguments)
        return thoughts.ReplyText(parts.thought, "", parts.content, parts.empty)

    monkeypatch.setattr(slots, "reply_text", reply_text)


@pytest.mark.parametrize(
    ("name", "fault", "conversation"),
    [
        ("chatml", _shorter_replies, _ONE),
        ("llama3", _lost_turn, _ONE),
        ("qwen3", _shorter_replies, _TOOLS),
        ("qwen3", _thoughts_in_history, _TOOLS),
        ("qwen3", _no_empty_thought, _ONE),
        ("qwen3", _lost_preface, _TOOLS),
    ],
)
def test_the_comparison_finds_faults(monkeypatch, name, fault: Callable, conversation):
    template, options = {**_PLAIN, "qwen3": _QWEN3}[name], {"enable_thinking": True} if name == "qwen3" else {}
    _check(name, template, conversation, **options)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        _check(name, template, conversation, **options)


ENDS = {
    **dict.fromkeys(["empty", "trl", "hunyuan_legacy"], ""),
    **dict.fromkeys(["chatml", "chatml_de", "qwen", "qwen_r1", "qwen_math_r1"], "<|im_end|>"),
    **dict.fromkeys(["qwen_lf", "qwen3", "qwen3_legacy", "minicpm3", "intern2", "plm"], "<|im_end|>\n"),
    **{"llama3": "<|eot_id|>", "gemma": "<end_of_turn>\n", "llama2": " </s>", "hunyuan": "<|eos|>"},
    **{"glm4_moe": "<|user|>", "deepseek4": "<｜end▁of▁sentence｜>", "gpt_oss_legacy": "<|end|>"},
    **dict.fromkeys(["bailing_mini", "bailing_mini_legacy"], "<|role_end|>"),
}
"""Template -> end mark of replies, the tokenizer's </s> where none is named and the template is not one of `CLOSED`."""

CLOSED = {"baichuan2", "chatglm2", "chatglm3", "chatglm3_system", "gemma_legacy", "glm4", "glm4_moe_legacy"}
CLOSED |= {"bailing_mini_legacy", "gpt_oss_legacy"} | {f"chatglm{n}_legacy" for n in ("2", "3", "3_system")}
"""Templates whose replies are closed by an eos label on the next token (efficient_eos)."""

LEADS = {
    **dict.fromkeys(["chatglm3", "chatglm3_system"], "\n "),
    **dict.fromkeys(["glm4", "glm4_moe", "glm4_moe_legacy", "chatglm3_legacy", "chatglm3_system_legacy"], "\n"),
    **dict.fromkeys(["mistral", "mixtral", "llama2", "deepseek2", "deepseek2-lite"], " "),
}
"""Template -> what the model writes in front of the text of a reply."""

STRIPS = {"gemma": True, "llama2": True, "glm4_moe": True}


@pytest.mark.parametrize("name", sorted({*template_names()} - {"gpt_oss", "gpt"}))
@settings(max_examples=8, deadline=None)
@given(conversation=_plain(replies=_TEXTS.filter(lambda text: text.strip() and not text.startswith("\n"))))
def test_loss_covers_the_replies_and_their_end_marks_only(name, conversation):
    """Replies do not begin with line ends here: templates that write thoughts take these off, as their models do."""
    template = load_template(name)
    pieces = (*template.prefix.pieces, *template.system.pieces, *template.user.pieces, *template.assistant.pieces)
    tokens = [piece.name for piece in pieces if isinstance(piece, SpecialToken)]
    tokenizer = byte_tokenizer([t for t in (*tokens, *template.stop_words) if t not in ("bos_token", "eos_token")])
    renderer = TemplateRenderer(template, tokenizer)
    turns = renderer.turns(conversation)

    end = ENDS.get(name, "" if name in CLOSED else "</s>")
    replies = [message.content for message in conversation.messages[1::2]]
    texts = [text.strip() if STRIPS.get(name) else text for text in replies]
    assert [tokenizer.decode(turn.target) for turn in turns] == [LEADS.get(name, "") + text + end for text in texts]

    assert (renderer.efficient_eos_id is not None) == (name in CLOSED)
    closing = [renderer.efficient_eos_id] if name in CLOSED else []
    expected = [token for turn in turns for token in (*turn.target, *closing)]
    ids, labels = build_sample(turns, SampleOptions(100_000), renderer.efficient_eos_id)
    assert labels[labels != IGNORE_INDEX].tolist() == expected
    assert ids.tolist() == [token for turn in turns for token in (*turn.source, *turn.target)] + closing
    # Each label stands on the token that it names, save the one that closes a reply.
    differing = [label for token, label in zip(ids, labels, strict=True) if label not in (IGNORE_INDEX, token)]
    assert differing == closing * (len(turns) - 1)
