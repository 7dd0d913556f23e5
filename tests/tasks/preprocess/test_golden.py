"""Renderings and loss masks against the golden renderings that lie beside the checkout; skipped where they do not.

The file holds what Ascend's MindSpeed-LLM renders. Every line is compared:

- as given, under the plain name, or under the name with `_legacy` where `OFFICIAL` says that the plain name is the
  model's own format;
- where the line has the text of the model's published template, the plain name gives that text;
- where the line records a defect, the text that is meant is expected instead, written out in `INTENDED`;
- a line of a crash (`upstream_error`) counts through its `_fixed` twin.
"""

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from mindspeed_llm.tasks.preprocess.layouts import piece_text
from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.records import FORMATS, SHAREGPT_TAGS, Conversation, Message, to_conversation
from mindspeed_llm.tasks.preprocess.render import TemplateRenderer
from mindspeed_llm.tasks.preprocess.samples import IGNORE_INDEX, SampleOptions, build_sample
from mindspeed_llm.tasks.preprocess.templates import load_template, template_names
from tests.support.tokenizers import byte_tokenizer

GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "data" / "reference" / "chat_golden.jsonl"
ROWS = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()] if GOLDEN.is_file() else []

OFFICIAL = {
    "qwen3": "no thought before the last question, no blank lines before the tools",
    "glm4_moe": "<think> without line ends after the one that follows <|assistant|>, calls in XML, results in tags",
    "gpt_oss": "harmony: developer message, channels, <|return|> and <|call|>",
    "llama2": "a space on both sides of a reply, text trimmed",
    "mistral": "a space in front of [INST] and of a reply, the system text in the first question",
    "gemma": "<end_of_turn> closes every reply, text trimmed, the system text in the first question",
    "chatglm2": "rounds count from 1",
}
"""Templates of the file whose plain name is the model's own format, and how it differs from the given one, which is
the same name with `_legacy`. All others of the file are as given under their plain name: `llama3` is Llama 3.0."""

_SPECIALS = (
    "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|start|>", "<|message|>", "<|end|>", "<|channel|>", "[gMASK]", "sop", "<sop>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>", "<start_of_turn>", "<end_of_turn>", "<｜User｜>", "<｜Assistant｜>",
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "｜DSML｜",
)  # fmt: skip

_WEATHER = (
    "You have access to the following tools:\n> Tool Name: get_weather\nTool Description: Get the current weather\n"
    "Tool Args:\n  - city (string, required): City name\n"
    "  - unit (string): Temperature unit, should be one of [celsius, fahrenheit]\n"
    "  - days (array): Day offsets, where each item should be integer\n\nUse the following format if using a tool:\n"
    "```\nAction: tool name (one of [get_weather]).\nAction Input: the input to the tool, in a JSON format "
    'representing the kwargs (e.g. ```{"input": "hello world", "num_beams": 5}```).\n```\n'
)
_QWEN_SYSTEM = "<|im_start|>system\nYou are a helpful assistant.{}<|im_end|>\n"
_QWEN_QUESTION = "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
_GLM4_HEAD = (
    "[gMASK]<sop><|system|>\n你是一个名为 GLM-4 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
    "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具"
)
_GLM4_REST = [
    ["<|user|>\nWeather in Paris?<|assistant|>", 'get_weather\n{"city": "Paris", "unit": "celsius"}'],
    ['<|observation|>\n{"temp": 18}<|assistant|>', "\nIt is 18 degrees in Paris."],
]


def _glm4_tools(row):
    """Each tool as in chat-formats, section 7: its name, its JSON with four spaces, one sentence."""
    return "".join(
        f"\n\n## {tool['name']}\n\n{json.dumps(tool, ensure_ascii=False, indent=4)}\n"
        "在调用上述函数时，请使用 Json 格式表示调用的参数。"
        for tool in json.loads(row["tools"])
    )


def _glm4(row, system):
    (question, call), answer = _GLM4_REST
    return [[_GLM4_HEAD + _glm4_tools(row) + system + question, call], answer]


def _glm4_moe_legacy(row):
    """The given text, with the tools that it lacks: the model's own listing, after the system text."""
    listing = row["official_text"].removeprefix("[gMASK]<sop><|system|>\n").split("</tool_call><|")[0] + "</tool_call>"
    (source, call), answer = row["rendered_pairs"]
    lead = "\n\n" if row["system"] else ""
    return [[source.replace("<|user|>", f"{lead}{listing}<|user|>"), call], answer]


def _numbered(row, first):
    """The given text, with the rounds counted from `first`, results of tools included."""
    numbers = itertools.count(first)
    return [[re.sub(r"\[Round [^]]+\]", lambda _: f"[Round {next(numbers)}]", s), t] for s, t in row["rendered_pairs"]]


INTENDED = {
    # The tools are lost.
    ("qwen", "tools_openai_wrapped"): lambda row: [
        [_QWEN_SYSTEM.format(_WEATHER) + _QWEN_QUESTION, "Sunny.<|im_end|>"]
    ],
    ("glm4", "tools_call"): lambda row: _glm4(row, ""),
    ("glm4", "tools_call_system"): lambda row: _glm4(row, "<|system|>\nYou can use tools."),
    ("glm4_moe", "tools_call"): _glm4_moe_legacy,
    ("glm4_moe", "tools_call_system"): _glm4_moe_legacy,
    # The text of the call is lost.
    ("qwen", "function_not_json"): lambda row: [
        [_QWEN_SYSTEM.format("") + _QWEN_QUESTION, "get_weather(Paris)<|im_end|>"],
        ["\n<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n", "18 degrees.<|im_end|>"],
    ],
    # The number of the round is not filled in.
    ("chatglm2", "tools_call"): lambda row: _numbered(row, 0),
    ("chatglm2", "tools_call_system"): lambda row: _numbered(row, 0),
    # The call is taken for the result of a tool.
    ("deepseek4", "sharegpt_function_call"): lambda row: [
        [
            "<｜begin▁of▁sentence｜><｜User｜>Weather?<｜Assistant｜></think>",
            '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="unit" string="true">celsius</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>",
        ],
        [
            '<｜User｜><tool_result>{"temp": 18}</tool_result><｜Assistant｜></think>',
            "18 degrees.<｜end▁of▁sentence｜>",
        ],
    ],
}
"""(template, case) of the lines that record a defect -> the (source, target) texts that are meant."""

INTENDED_PAIRS = {
    # The rejected reply, without a thought, lacks the empty one. It is part of the reply, since both sides of a pair
    # have the same prompt, and the chosen reply begins with its thought.
    ("qwen3", "pairwise_think_none"): "<think>\n\n</think>\n\n",
    ("glm4_moe", "pairwise_think_none"): "<think>\n\n</think>\n\n",
}
"""(template, case) of the preference pairs that record a defect -> what the rejected reply begins with."""

ERRORS = [row for row in ROWS if row.get("upstream_error")]
PAIRS = [row for row in ROWS if row.get("mode") == "pairwise"]
SINGLE = [row for row in ROWS if row not in ERRORS and row not in PAIRS]

pytestmark = pytest.mark.skipif(not ROWS, reason="no golden renderings beside the checkout")


def _key(row):
    return row["template"], row["case"]


def _given_name(row):
    return row["template"] + "_legacy" * (row["template"] in OFFICIAL)


def _renderer(name, row):
    return TemplateRenderer(
        load_template(name),
        byte_tokenizer(_SPECIALS),
        enable_thinking=row["enable_thinking"],
        drop_thinking=row.get("drop_thinking", True),
        reasoning_effort=row.get("reasoning_effort"),
    )


def _conversation(row):
    formatting = {"Alpaca": "alpaca", "Sharegp": "sharegpt", "OpenAI": "openai"}[
        re.match("Alpaca|Sharegp|OpenAI", row["handler"])[0]
    ]
    return to_conversation(Record(GOLDEN, 1, row["record"]), formatting, FORMATS[formatting].columns, SHAREGPT_TAGS)


def _texts(renderer, conversation, row):
    return [
        [piece_text(part, bos_token=row["bos_token"], eos_token=row["eos_token"]) for part in (source, target)]
        for source, target, _ in renderer.pieces(conversation)
    ]


def _sample(renderer, turns, *, mask_history=False):
    """(text, runs of labels as text, [token, label] where they differ) of the sample that the turns make."""
    decode = byte_tokenizer(_SPECIALS).decode
    options = SampleOptions(cutoff_len=100_000, mask_history=mask_history)
    ids, labels = build_sample(turns, options, renderer.efficient_eos_id)
    runs = [
        decode([token for _, token in group])
        for has_loss, group in itertools.groupby(enumerate(labels), key=lambda item: item[1] != IGNORE_INDEX)
        if has_loss
    ]
    differing = [[decode([a]), decode([b])] for a, b in zip(ids, labels, strict=True) if b not in (IGNORE_INDEX, a)]
    return decode(ids), runs, differing


def _id(row):
    return f"{row['template']}-{row['case']}-{row['enable_thinking']}"


def test_every_line_is_compared():
    assert len(ROWS) == 159
    assert Counter(map(id, [*ERRORS, *PAIRS, *SINGLE])) == Counter(map(id, ROWS))
    fixed = {_key(row) for row in SINGLE}
    assert all((row["template"], f"{row['case']}_fixed") in fixed for row in ERRORS)
    assert set(INTENDED) <= fixed
    assert set(INTENDED_PAIRS) <= {_key(row) for row in PAIRS}
    # The table says the whole truth about which of the names differ.
    names = {row["template"] for row in ROWS}
    assert {name for name in names if f"{name}_legacy" in template_names()} == set(OFFICIAL)
    noted = {row["template"] for row in SINGLE if "official" in row.get("note", "") and _key(row) not in INTENDED}
    assert noted - {"llama3"} <= set(OFFICIAL), "llama3: only later models differ, Llama 3.0 is as given"
    assert {row["template"] for row in ROWS if row.get("official_text")} <= set(OFFICIAL)


@pytest.mark.parametrize("row", SINGLE, ids=_id)
def test_text_ids_and_loss_spans(row):
    renderer, conversation = _renderer(_given_name(row), row), _conversation(row)
    if not row["handler"].startswith("OpenAI"):
        roles = [(message.role, message.content) for message in conversation.messages]
        assert roles == [(message["role"], message["content"]) for message in row["messages"]]

    given = row["rendered_pairs"]
    expected = INTENDED[_key(row)](row) if _key(row) in INTENDED else given
    assert (expected != given) == (_key(row) in INTENDED), "a defect is one where the given text is not meant"
    assert _texts(renderer, conversation, row) == expected

    text, runs, differing = _sample(renderer, renderer.turns(conversation))
    if expected == given:
        assert (text, runs, differing) == (
            row["full_text"], row["loss_text_spans"], row.get("label_differs_from_input", []),
        )  # fmt: skip
        return
    # Loss on the replies; the label of the end of a reply stands on the next token, or on one appended.
    closing = row["eos_token"] if renderer.efficient_eos_id is not None else ""
    assert text == "".join(itertools.chain(*expected)) + closing
    assert runs == [target + closing for _, target in expected]


def _without_thoughts(row):
    """The published text for the conversation that enable_thinking false makes: no thoughts, questions marked."""
    text = row["official_text"]
    if row["template"] == "qwen3":
        return re.sub(r"<think>\n.*?\n</think>", "<think>\n\n</think>", text, flags=re.DOTALL)
    return re.sub("<think>.*?</think>", "<think></think>", text).replace("<|assistant|>", "/nothink<|assistant|>")


@pytest.mark.parametrize("row", [row for row in SINGLE if row.get("official_text")], ids=_id)
def test_plain_name_gives_the_published_text(row):
    renderer, conversation = _renderer(row["template"], row), _conversation(row)
    pairs = _texts(renderer, conversation, row)
    expected = _without_thoughts(row) if row["enable_thinking"] is False else row["official_text"]
    # GLM-4.5 ends a reply with the mark of the turn that follows, also at the end, where the template stops before it.
    end = "<|user|>" * (row["template"] == "glm4_moe")
    assert "".join(itertools.chain(*pairs)) == expected + end
    text, runs, differing = _sample(renderer, renderer.turns(conversation))
    assert text == expected + end
    assert runs == [target for _, target in pairs]
    assert differing == []
    ends = {"qwen3": r"<\|im_end\|>\n", "glm4_moe": r"<\|(user|observation)\|>"}
    assert all(re.search(ends[row["template"]] + "$", run) for run in runs)


@pytest.mark.parametrize("row", PAIRS, ids=_id)
def test_preference_pairs(row):
    prompt = Conversation([Message(m["role"], m["content"]) for m in row["messages"]], system=row["system"] or "")
    replies = [Message("assistant", row[side]) for side in ("chosen", "rejected")]
    names = {_given_name(row), row["template"]} if row["template"] == "qwen3" else {_given_name(row)}
    for name in names:
        renderer = _renderer(name, row)
        sides = renderer.pair_turns(prompt, *replies)
        assert [turn.source for turn in sides[0]] == [turn.source for turn in sides[1]]
        for turns, given, suffix in zip(sides, row["rendered_pairs"], ("", "_rejected"), strict=True):
            text, runs, _ = _sample(renderer, turns, mask_history=True)
            lead = INTENDED_PAIRS.get(_key(row), "") if suffix else ""
            source, target = given
            assert text == source + lead + target
            assert text == row[f"full_text{suffix}"] or lead
            first, *rest = row[f"loss_text_spans{suffix}"]
            assert runs == [lead + first, *rest]
