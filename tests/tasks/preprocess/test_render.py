"""From pieces to token ids: markers, missing tokens, options, batches, pairs and prompts.

The texts of the templates are tested in test_templates.py, test_golden.py and test_official_renderings.py.
"""

import itertools

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import render as render_module
from mindspeed_llm.tasks.preprocess.layouts import RenderOptions, make_layout
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from mindspeed_llm.tasks.preprocess.render import TemplateRenderer
from mindspeed_llm.tasks.preprocess.templates import load_template, template_names
from tests.support.tokenizers import byte_tokenizer, chatml_tokenizer

Q, A = Message("user", "q"), Message("assistant", "a")
TOOLS = '[{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]'


def render(name, conversation, tokenizer=None, *, enable_thinking=None, **options):
    tokenizer = tokenizer or chatml_tokenizer()
    renderer = TemplateRenderer(load_template(name).with_options(**options), tokenizer, enable_thinking=enable_thinking)
    turns = renderer.turns(conversation)
    return [(tokenizer.decode(turn.source), tokenizer.decode(turn.target)) for turn in turns]


def test_markers_are_single_ids():
    tokenizer = chatml_tokenizer()
    (turn,) = TemplateRenderer(load_template("chatml"), tokenizer).turns(Conversation([Q, A]))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert turn.target == [*tokenizer.encode("a"), end]
    assert turn.source.count(end) == 1


def test_content_is_literal():
    text = "{{content}} {{idx}} {{name}} \\n"
    ((source, target),) = render("default", Conversation([Message("user", text), Message("assistant", text)]))
    assert (source, target) == (f"Human: {text}\nAssistant:", f"{text}</s>")


def test_empty_system_gives_no_block_and_default_system_can_be_set():
    conversation = Conversation([Q, A])
    assert render("chatml", conversation)[0][0] == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    expected = "<|im_start|>system\nS<|im_end|>\n"
    assert render("chatml", conversation, default_system="S")[0][0].startswith(expected)
    assert not render("qwen", conversation, default_system="")[0][0].startswith("<|im_start|>system")


def test_qwen3_preface_and_reasoning_of_openai_records():
    call = Message("function", '[{"name": "f", "arguments": {}}]', reasoning="R", preface="Let me see.")
    first, _ = render("qwen3", Conversation([Q, call, Message("observation", "1"), A]))
    call_text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert first[1] == f"<think>\nR\n</think>\n\nLet me see.\n{call_text}<|im_end|>\n"
    first, _ = render("qwen3", Conversation([Q, call, Message("observation", "1"), A]), enable_thinking=False)
    assert first[1] == f"Let me see.\n{call_text}<|im_end|>\n"


def test_tool_format_can_be_set():
    call = Message("function", '{"name": "f", "arguments": {}}')
    ((source, target),) = render("qwen", Conversation([Q, call], tools=TOOLS), tool_format="qwen")
    assert "\n# Tools\n" in source
    assert target == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'
    ((_, target),) = render("qwen3", Conversation([Q, call]), tool_format="default", enable_thinking=None)
    assert target == "Action: f\nAction Input: {}<|im_end|>\n"
    ((_, target),) = render("glm4", Conversation([Q, call]), tool_format="glm4_moe")
    assert target == "\n<tool_call>f\n</tool_call>"
    with pytest.raises(UserError, match=r"data\.tool_format: 'qwem'; expected one of default, qwen"):
        load_template("qwen").with_options(tool_format="qwem")
    with pytest.raises(UserError, match="'gpt_oss' writes tools in its model's own way only"):
        load_template("gpt_oss").with_options(tool_format="qwen")


def test_efforts_that_a_template_does_not_know():
    with pytest.raises(UserError, match="--reasoning-effort max: template 'gpt_oss' knows low, medium, high"):
        TemplateRenderer(load_template("gpt_oss"), byte_tokenizer(), reasoning_effort="max")
    with pytest.raises(UserError, match="template 'default' knows none, leave it out"):
        TemplateRenderer(load_template("default"), byte_tokenizer(), reasoning_effort="high")


@pytest.mark.parametrize("tools", ["no json", '["f"]'])
def test_bad_tools(tools):
    with pytest.raises(UserError, match="tools: "):
        render("qwen3", Conversation([Q, A], tools=tools))


def test_tokenizer_without_the_markers():
    with pytest.raises(UserError, match=r"template 'qwen3' needs the token '<\|im_end\|>'"):
        render("qwen3", Conversation([Q, A]), byte_tokenizer())
    with pytest.raises(UserError, match="the tokenizer has none"):
        render("default", Conversation([Q, A]), byte_tokenizer(eos_token=None))


def test_bos_is_left_out_where_the_tokenizer_has_none():
    markers = ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    with_bos = render("llama3", Conversation([Q, A]), byte_tokenizer(markers))[0][0]
    without = render("llama3", Conversation([Q, A]), byte_tokenizer(markers, bos_token=None))[0][0]
    assert with_bos == "<s>" + without


def decoded(tokenizer, turns):
    return [(tokenizer.decode(turn.source), tokenizer.decode(turn.target)) for turn in turns]


def test_a_batch_equals_its_conversations_one_by_one():
    tokenizer = chatml_tokenizer()
    renderer = TemplateRenderer(load_template("qwen"), tokenizer)
    conversations = [
        Conversation([Q, A]),
        Conversation([Q, A, Message("user", "谢"), Message("assistant", "a", loss=False)], system="S"),
        Conversation([]),
    ]
    assert renderer.turns_batch(conversations) == [renderer.turns(conversation) for conversation in conversations]
    assert [[turn.train for turn in turns] for turns in renderer.turns_batch(conversations)] == [
        [True],
        [True, False],
        [],
    ]
    assert renderer.turns_batch([]) == []


PROMPT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
WITH_THOUGHT = "<think>\nt\n</think>\n\nx"
PAIR_RULES = [
    # enable_thinking, chosen, rejected -> the end of the prompt, both targets
    (None, "x", "y", EMPTY_THOUGHT, "x", "y"),
    (None, WITH_THOUGHT, "y", "", WITH_THOUGHT, EMPTY_THOUGHT + "y"),
    (None, "y", WITH_THOUGHT, "", EMPTY_THOUGHT + "y", WITH_THOUGHT),
    (None, WITH_THOUGHT, WITH_THOUGHT, "", WITH_THOUGHT, WITH_THOUGHT),
    (False, "x", "y", EMPTY_THOUGHT, "x", "y"),
    (False, WITH_THOUGHT, "y", EMPTY_THOUGHT, "x", "y"),
    (True, "x", "y", "", EMPTY_THOUGHT + "x", EMPTY_THOUGHT + "y"),
    (True, WITH_THOUGHT, "y", "", WITH_THOUGHT, EMPTY_THOUGHT + "y"),
]


def _check_pair(enable_thinking, chosen, rejected, prompt_end, *targets):
    tokenizer = chatml_tokenizer()
    for name, end in (("qwen3", "<|im_end|>\n"), ("qwen3_legacy", "<|im_end|>\n")):
        renderer = TemplateRenderer(load_template(name), tokenizer, enable_thinking=enable_thinking)
        replies = [Message("assistant", text) for text in (chosen, rejected)]
        sides = renderer.pair_turns(Conversation([Q]), *replies)
        assert [decoded(tokenizer, side) for side in sides] == [
            [(PROMPT + prompt_end, target + end)] for target in targets
        ]


@pytest.mark.parametrize("rule", PAIR_RULES)
def test_both_sides_of_a_pair_have_one_prompt(rule):
    """A pair is compared by the probabilities of its replies after the same prompt."""
    _check_pair(*rule)


@pytest.mark.parametrize("name", template_names())
@pytest.mark.parametrize("enable_thinking", [None, True, False])
def test_prompts_of_pairs_are_the_same_under_every_template(name, enable_thinking):
    template = load_template(name)
    layout = make_layout(template, RenderOptions(enable_thinking=enable_thinking))
    renderer = object.__new__(TemplateRenderer)
    renderer._layout, renderer._encode = layout, lambda sides: sides
    prompt = Conversation([Q, A, Message("user", "r")], system="S")
    thought = template.thinking.opening + "t" + template.thinking.closing
    for texts in itertools.product(("x", "", thought + "y", thought), repeat=2):
        sides = renderer.pair_turns(prompt, *(Message("assistant", text) for text in texts))
        assert [source for source, _, _ in sides[0]] == [source for source, _, _ in sides[1]]


def test_a_prompt_of_its_own_for_each_side_is_found(monkeypatch):
    monkeypatch.setattr(render_module, "_sources", lambda turns: [])
    with pytest.raises(AssertionError):
        _check_pair(*PAIR_RULES[1])


@pytest.mark.parametrize(("enable_thinking", "empty"), [(True, ""), (None, ""), (False, "<think>\n\n</think>\n\n")])
def test_prompt_ends_where_the_model_begins(enable_thinking, empty):
    tokenizer = chatml_tokenizer()
    renderer = TemplateRenderer(load_template("qwen3"), tokenizer, enable_thinking=enable_thinking)
    text = tokenizer.decode(renderer.prompt_ids(Conversation([Q, A, Message("user", "r")])))
    assert text.endswith("a<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n" + empty)
