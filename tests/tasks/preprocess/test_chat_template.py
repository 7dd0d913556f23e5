"""The tokenizer's own chat template: ids equal transformers' apply_chat_template, masks cover the replies."""

import bisect
import json

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import chat_template, generation_marks
from mindspeed_llm.tasks.preprocess.chat_template import ChatTemplateRenderer
from mindspeed_llm.tasks.preprocess.once import warn_once
from mindspeed_llm.tasks.preprocess.records import Conversation, Message, UnusableRecord
from mindspeed_llm.tasks.preprocess.samples import SampleOptions, build_sample
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from tests.support.tokenizer_files import byte_level_bpe
from tests.support.tokenizers import CHATML_TEMPLATE, chatml_tokenizer

# As the templates of reasoning models write it, in small: thoughts and empty thoughts after the last question only.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\\n' }}{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

MESSAGES = [
    Message("user", "q one"),
    Message("assistant", "assistant\n<|im_start|>"),
    Message("user", "q 二"),
    Message("assistant", "r 🙂"),
]
ROLES = [{"role": message.role, "content": message.content} for message in MESSAGES]
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
)
# Shows the thoughts of the last reply only, as templates of reasoning models do.
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _ids(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML_TEMPLATE, "<|im_end|>\n"), (GENERATION, "<|im_end|>")], ids=["prefixes", "generation"]
)
def test_ids_and_spans(template, end):
    tokenizer = chatml_tokenizer(chat_template=template)
    turns = ChatTemplateRenderer(tokenizer).turns(Conversation(MESSAGES, system="S"))
    ids = [token for turn in turns for token in turn.source + turn.target]
    assert ids == _ids(tokenizer, [{"role": "system", "content": "S"}, *ROLES])
    targets = [tokenizer.decode(turn.target) for turn in turns if turn.target]
    assert targets == [ROLES[1]["content"] + end, ROLES[3]["content"] + end]


def test_loss_flags_follow_their_replies():
    messages = [MESSAGES[0], Message("assistant", "x", loss=False), *MESSAGES[2:]]
    for template in (CHATML_TEMPLATE, GENERATION):
        turns = ChatTemplateRenderer(chatml_tokenizer(chat_template=template)).turns(Conversation(messages))
        assert [turn.train for turn in turns if turn.target] == [False, True]


def _targets(renderer, conversation):
    decode = chatml_tokenizer().decode
    return [decode(turn.target) for turn in renderer.turns(conversation) if turn.target]


def test_template_that_leaves_old_thoughts_out():
    """Neither prompt nor reply of the first turn is a prefix of the whole; the masks are found all the same."""
    tokenizer = chatml_tokenizer(chat_template=REWRITING)
    first, last = Message("assistant", "<think>t</think>a"), Message("assistant", "<think>u</think>b")
    renderer = ChatTemplateRenderer(tokenizer)
    turns = renderer.turns(Conversation([MESSAGES[0], first, MESSAGES[2], last]))
    assert [tokenizer.decode(turn.target) for turn in turns] == ["a<|im_end|>\n", "<think>u</think>b<|im_end|>\n"]
    given = [{"role": m.role, "content": m.content} for m in (MESSAGES[0], first, MESSAGES[2], last)]
    assert [token for turn in turns for token in turn.source + turn.target] == _ids(tokenizer, given)
    (turn,) = ChatTemplateRenderer(tokenizer, last_only=True).turns(Conversation([MESSAGES[0], first, *MESSAGES[2:]]))
    assert tokenizer.decode(turn.target) == "r 🙂<|im_end|>\n"
    assert "<think>" not in tokenizer.decode(turn.source)


@pytest.mark.parametrize(
    ("enable_thinking", "expected"),
    [
        (True, ["x<|im_end|>\n", "CALL f<|im_end|>\n", "<think>\nT\n</think>\n\ny<|im_end|>\n"]),
        (False, ["x<|im_end|>\n", "CALL f<|im_end|>\n", "y<|im_end|>\n"]),
    ],
)
def test_template_that_thinks_after_the_last_question_only(enable_thinking, expected):
    tokenizer = chatml_tokenizer(chat_template=THINKING)
    call = Message("function", '{"name": "f", "arguments": {}}')
    replies = [Message("assistant", "x", reasoning="R"), call, Message("assistant", "y", reasoning="T")]
    sources = [MESSAGES[0], MESSAGES[2], Message("observation", "out")]
    conversation = Conversation([message for pair in zip(sources, replies, strict=True) for message in pair])
    renderer = ChatTemplateRenderer(tokenizer, enable_thinking=enable_thinking)
    assert _targets(renderer, conversation) == expected
    empty = "<think>\n\n</think>\n\n"
    assert tokenizer.decode(renderer.turns(conversation)[-1].source).endswith(
        f"assistant\n{'' if enable_thinking else empty}"
    )


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        ("{{ m.content if loop.last else m.content | upper }}", "changes the words of old replies"),
        ("{{ m.content if loop.last else '' }}", "leaves old replies out"),
        ("{{ m.content }}{{ '' if loop.last else m.content }}", "repeats old replies"),
    ],
)
def test_what_cannot_be_proven_is_refused(shown, why):
    tokenizer = chatml_tokenizer(chat_template=REWRITING.replace("{{ m['content'].split('</think>')[-1] }}", shown))
    with pytest.raises(UserError, match=r"set data\.mask_history \(--mask-history\)"):
        ChatTemplateRenderer(tokenizer).turns(Conversation(MESSAGES))
    (turn,) = ChatTemplateRenderer(tokenizer, last_only=True).turns(Conversation(MESSAGES))
    assert tokenizer.decode(turn.target) == "r 🙂<|im_end|>\n"


def test_a_shown_thought_that_the_prompt_does_not_open_is_refused():
    """Where only the text behind the thought can be found, the thought would be left without loss unseen."""
    template = THINKING.replace("'<think>\\n'", "'<think> '")
    tokenizer = chatml_tokenizer(chat_template=template + "{% if add_generation_prompt %}<think>\n{% endif %}")
    conversation = Conversation([MESSAGES[0], Message("assistant", "y", reasoning="T")])
    with pytest.raises(UserError, match="replies cannot be told from prompts"):
        ChatTemplateRenderer(tokenizer, enable_thinking=True).turns(conversation)


def test_template_without_end_marks_closes_replies_by_the_eos_label():
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = chatml_tokenizer(chat_template=template)
    renderer = ChatTemplateRenderer(tokenizer)
    ids, labels = build_sample(renderer.turns(Conversation(MESSAGES)), SampleOptions(1000), renderer.efficient_eos_id)
    assert tokenizer.decode(ids) == tokenizer.decode(_ids(tokenizer, ROLES)) + "</s>"
    assert tokenizer.decode(labels[labels != -100]) == f"{ROLES[1]['content']}</s>{ROLES[3]['content']}</s>"
    assert ChatTemplateRenderer(chatml_tokenizer()).efficient_eos_id is None
    assert ChatTemplateRenderer(chatml_tokenizer(chat_template=template, eos_token=None)).efficient_eos_id is None


def test_variables_and_default_system_reach_the_template():
    template = "{{ 'T' if enable_thinking else 'F' }}" + CHATML_TEMPLATE
    tokenizer = chatml_tokenizer(chat_template=template)
    conversation = Conversation(MESSAGES[:2])
    for thinking, expected in ((True, "T"), (False, "F"), (None, "F")):
        (turn,) = ChatTemplateRenderer(tokenizer, enable_thinking=thinking).turns(conversation)
        assert tokenizer.decode(turn.source)[0] == expected
    renderer = ChatTemplateRenderer(chatml_tokenizer(), default_system="D")
    source = chatml_tokenizer().decode(renderer.turns(conversation)[0].source)
    assert source.startswith("<|im_start|>system\nD<|im_end|>")


def test_tool_calls_reach_the_template_as_objects():
    template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "CALL {{ c.function.name }} {{ c.function.arguments.x }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = chatml_tokenizer(chat_template=template)
    call = Message("function", '{"name": "f", "arguments": {"x": 3}}', preface="see: ")
    messages = [MESSAGES[0], call, Message("observation", "out"), MESSAGES[3]]
    turns = ChatTemplateRenderer(tokenizer).turns(Conversation(messages, tools='[{"name": "f"}]'))
    assert tokenizer.decode(turns[0].source).startswith("[f]<|im_start|>user\n")
    assert tokenizer.decode(turns[0].target) == "see: CALL f 3<|im_end|>\n"
    assert tokenizer.decode(turns[1].source) == "<|im_start|>tool\nout<|im_end|>\n<|im_start|>assistant\n"


def test_errors_of_the_template_are_reported():
    tokenizer = chatml_tokenizer(chat_template="{{ raise_exception('system role not supported') }}")
    with pytest.raises(UserError, match="system role not supported"):
        ChatTemplateRenderer(tokenizer).turns(Conversation(MESSAGES))


def test_tools_that_the_template_leaves_out_are_an_error():
    renderer = ChatTemplateRenderer(chatml_tokenizer())
    with pytest.raises(UserError, match="leaves out the tool 'f'"):
        renderer.turns(Conversation(MESSAGES, tools='[{"name": "f"}]'))
    call = Message("function", '{"name": "g", "arguments": {}}')
    with pytest.raises(UserError, match="leaves out the tool 'g'"):
        renderer.turns(Conversation([MESSAGES[0], call, Message("observation", "1"), MESSAGES[3]]))


def test_reasoning_is_kept_by_templates_that_know_no_field_for_it():
    conversation = Conversation([MESSAGES[0], Message("assistant", "a", reasoning="R")])
    tokenizer = chatml_tokenizer()
    (turn,) = ChatTemplateRenderer(tokenizer).turns(conversation)
    assert tokenizer.decode(turn.target) == "<think>\nR\n</think>\n\na<|im_end|>\n"
    tokenizer = chatml_tokenizer(chat_template=CHATML_TEMPLATE.replace("\n{{", "\n[{{ message.reasoning_content }}]{{"))
    (turn,) = ChatTemplateRenderer(tokenizer).turns(conversation)
    assert tokenizer.decode(turn.target) == "[R]a<|im_end|>\n"


def test_batches_pairs_and_prompts():
    tokenizer = chatml_tokenizer()
    renderer = ChatTemplateRenderer(tokenizer)
    conversation = Conversation(MESSAGES)
    assert renderer.turns_batch([conversation] * 2) == [renderer.turns(conversation)] * 2

    prompt = Conversation(MESSAGES[:3], system="S")
    given = [{"role": "system", "content": "S"}, *ROLES[:3]]
    assert renderer.prompt_ids(prompt) == _ids(tokenizer, given, add_generation_prompt=True)
    for turns, reply in zip(
        renderer.pair_turns(prompt, Message("assistant", "x"), Message("assistant", "y")), "xy", strict=True
    ):
        (turn,) = turns
        assert turn.source == renderer.prompt_ids(prompt)
        assert tokenizer.decode(turn.target) == f"{reply}<|im_end|>\n"


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, THINKING], ids=["chatml", "thinking"])
def test_tokenizers_without_offsets_give_the_same_turns(template):
    tokenizer = as_tokenizer(chatml_tokenizer(chat_template=template))
    with_offsets = ChatTemplateRenderer(tokenizer).turns(Conversation(MESSAGES, system="S"))
    tokenizer.encode_with_offsets = lambda text: None
    assert ChatTemplateRenderer(tokenizer).turns(Conversation(MESSAGES, system="S")) == with_offsets


def test_results_carry_the_name_and_id_of_their_call():
    template = CHATML_TEMPLATE.replace("\n{{", "\n{{ message.name }}/{{ message.tool_call_id }} {{", 1) + (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    )
    calls = '[{"id": "1", "name": "f", "arguments": {}}, {"id": "2", "name": "g", "arguments": {}}]'
    results = [Message("observation", "x", call_id="2"), Message("observation", "y")]
    conversation = Conversation([MESSAGES[0], Message("function", calls), *results, MESSAGES[3]])
    tokenizer = chatml_tokenizer(chat_template=template)
    (turn,) = ChatTemplateRenderer(tokenizer, last_only=True).turns(conversation)
    text = tokenizer.decode(turn.source)
    assert "<|im_start|>tool\ng/2 x<|im_end|>" in text and "<|im_start|>tool\ng/2 y<|im_end|>" in text


def test_calls_beyond_those_that_a_template_shows_are_an_error():
    """Some templates write one call for a reply: the others would be lost unseen, though their tools are listed."""
    template = (
        "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    renderer = ChatTemplateRenderer(chatml_tokenizer(chat_template=template))
    tools = '[{"name": "f"}, {"name": "g"}]'
    calls = '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'
    with pytest.raises(UserError, match="leaves out the tool 'g', since it knows no tools, or fewer calls at once"):
        renderer.turns(Conversation([MESSAGES[0], Message("function", calls)], tools=tools))


# Marks the thought and the answer of a reply on their own, and leaves an empty reply unmarked.
IN_PARTS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% if m.reasoning_content %}"
    "{% generation %}{{ m.reasoning_content }}{% endgeneration %}|{% endif %}"
    "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% else %}Q:{{ m.content }}{% endif %}{% endfor %}"
)


def _trained(renderer, messages, **options):
    decode = chatml_tokenizer().decode
    turns = renderer.turns(Conversation(messages))
    _, labels = build_sample(turns, SampleOptions(1000, **options), renderer.efficient_eos_id)
    return decode(labels[labels != -100])


def _in_parts(*replies):
    return [message for reply in replies for message in (Message("user", "q"), reply)]


def test_flags_of_replies_that_a_template_marks_in_parts():
    """As many stretches as replies, and yet not one for each: flags follow whose text it is."""
    renderer = ChatTemplateRenderer(chatml_tokenizer(chat_template=IN_PARTS))
    bad = Message("assistant", "BAD", reasoning="bad thought", loss=False)
    good = Message("assistant", "good", reasoning="thought")
    assert _trained(renderer, _in_parts(bad, Message("assistant", ""), good)) == "thoughtgood<|im_end|>"
    assert _trained(renderer, _in_parts(good, bad, Message("assistant", ""))) == "thoughtgood<|im_end|>"
    silent = Message("assistant", "", loss=False)
    assert _trained(renderer, _in_parts(silent, good)) == "thoughtgood<|im_end|>"
    assert _trained(renderer, _in_parts(bad, Message("assistant", "x"))) == "x<|im_end|>"


def test_last_replies_that_a_template_marks_in_parts():
    """Samples train on one stretch of the last reply: more would be lost, and that of another reply be wrong."""
    renderer = ChatTemplateRenderer(chatml_tokenizer(chat_template=IN_PARTS), last_only=True)
    good = Message("assistant", "good", reasoning="thought")
    assert _trained(renderer, _in_parts(good, Message("assistant", "x")), mask_history=True) == "x<|im_end|>"
    with pytest.raises(UnusableRecord):
        _trained(renderer, _in_parts(good, Message("assistant", "")), mask_history=True)
    with pytest.raises(UserError, match="marks replies in parts, of which only the last would carry loss"):
        renderer.turns(Conversation(_in_parts(good)))
    with pytest.raises(UserError, match="marks replies in parts"):
        renderer.pair_turns(Conversation([MESSAGES[0]]), good, Message("assistant", "x"))


def test_marks_whose_reply_cannot_be_told_are_refused():
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
        "{% endgeneration %}{% endif %}{% endfor %}"
    )
    renderer = ChatTemplateRenderer(chatml_tokenizer(chat_template=template))
    without = [MESSAGES[0], Message("assistant", "x", loss=False), *MESSAGES[2:]]
    with pytest.raises(UserError, match=r"cannot be told whose they are.*--prompt-type"):
        renderer.turns(Conversation(without))


def test_stretches_counted_off_would_train_on_the_wrong_reply(monkeypatch):
    """The rule that was wrong once: the comparison above finds it."""
    monkeypatch.setattr(generation_marks, "owners", lambda text, spans, marks: list(range(len(spans))))
    with pytest.raises((AssertionError, IndexError)):
        test_flags_of_replies_that_a_template_marks_in_parts()


@pytest.mark.parametrize(
    ("behind", "taught", "closes_by_label"),
    [
        ("<|im_end|>\n", "<|im_end|>", False),
        ("{{ '\\n' }}<|im_end|>", "\n<|im_end|>", False),
        ("</s>", "</s>", False),
        ("{{ '\\n' }}", "</s>", True),
        ("", "</s>", True),
    ],
)
def test_ends_that_a_mark_leaves_out_are_taught(behind, taught, closes_by_label):
    template = GENERATION.replace("<|im_end|>{% endgeneration %}\n", "{% endgeneration %}" + behind)
    tokenizer = chatml_tokenizer(chat_template=template)
    renderer = ChatTemplateRenderer(tokenizer)
    assert _trained(renderer, MESSAGES) == f"{ROLES[1]['content']}{taught}{ROLES[3]['content']}{taught}"
    assert (renderer.efficient_eos_id is not None) == closes_by_label
    ids = [token for turn in renderer.turns(Conversation(MESSAGES)) for token in turn.source + turn.target]
    assert ids == _ids(tokenizer, ROLES)


def test_ends_that_are_not_looked_for_would_not_be_taught(monkeypatch):
    monkeypatch.setattr(ChatTemplateRenderer, "_ending", lambda self, marks_replies, tools: ([], False))
    for behind, taught in (("<|im_end|>", "<|im_end|>"), ("", "</s>")):
        with pytest.raises(AssertionError):
            test_ends_that_a_mark_leaves_out_are_taught(behind, taught, not behind)


def test_parts_of_replies_are_not_taught_to_end_it():
    renderer = ChatTemplateRenderer(chatml_tokenizer(chat_template=IN_PARTS.replace("<|im_end|>", "")))
    with pytest.raises(UserError, match="each would be taught to end the reply"):
        renderer.turns(Conversation(_in_parts(Message("assistant", "good", reasoning="thought"))))


def test_white_space_behind_replies_is_no_end_mark():
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    renderer = ChatTemplateRenderer(chatml_tokenizer(chat_template=template))
    assert _trained(renderer, _in_parts(Message("assistant", "a"), Message("assistant", "b"))) == "a\n</s>b\n</s>"


def test_no_end_at_all_is_reported(caplog):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    warn_once.cache_clear()
    for _ in range(2):
        assert ChatTemplateRenderer(chatml_tokenizer(chat_template=template, eos_token=None)).efficient_eos_id is None
    assert caplog.text.count("will not learn to end its replies") == 1


# As DeepSeek-R1: thoughts are cut off every reply, and the prompt opens one.
CUTTING = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% else %}"
    "{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    "reply",
    [
        Message("assistant", "a", reasoning="thought"),
        Message("assistant", "<think>\nthought\n</think>\n\na"),
        Message("assistant", "thought\n</think>\n\na"),
    ],
    ids=["field", "text", "opened"],
)
def test_thoughts_that_a_template_cuts_off_are_an_error(reply, caplog):
    warn_once.cache_clear()
    tokenizer = chatml_tokenizer(chat_template=CUTTING)
    renderer = ChatTemplateRenderer(tokenizer)
    assert "begins replies with <think> when it generates" in caplog.text
    with pytest.raises(UserError, match=r"leaves out the thought of the last reply.*--prompt-type.*--enable-thinking"):
        renderer.turns(Conversation([MESSAGES[0], reply]))
    history = [MESSAGES[0], reply, *MESSAGES[2:]]
    assert _trained(renderer, history).endswith("r 🙂</s>")
    without = ChatTemplateRenderer(tokenizer, enable_thinking=False)
    assert _trained(without, [MESSAGES[0], reply]).strip() == "a</s>"


def test_thoughts_in_a_field_that_a_template_ignores_are_an_error():
    template = CHATML_TEMPLATE + "{# message.reasoning_content #}"
    renderer = ChatTemplateRenderer(chatml_tokenizer(chat_template=template))
    with pytest.raises(UserError, match="leaves out the thought"):
        renderer.turns(Conversation([MESSAGES[0], Message("assistant", "a", reasoning="R")]))


SPACED = (
    "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }} A: {% else %}{{ m.content }}</s>{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize(
    ("template", "reply", "first"), [(SPACED, "then it is", " the"), (SPACED.replace("A: ", "A:\n"), "\nx", "\n\n")]
)
def test_the_token_across_prompt_and_reply_carries_loss(template, reply, first, trim, fast):
    backend = byte_level_bpe("</s>", "<s>", vocab_size=300)
    backend = _with_merges(backend, first)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim)
    transformed = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")
    transformed.chat_template = template
    tokenizer = as_tokenizer(transformed)
    if not fast:
        tokenizer.encode_with_offsets = lambda text: None
    renderer = ChatTemplateRenderer(tokenizer)
    (turn,) = renderer.turns(Conversation([Message("user", "hi"), Message("assistant", reply)]))
    assert tokenizer.decode(turn.source + turn.target) == template_text(template, "hi", reply)
    assert tokenizer.decode(turn.target[:1]).startswith(first[:1])
    assert tokenizer.decode(turn.target).lstrip() == f"{reply}</s>".lstrip()


def test_borders_by_the_beginnings_of_tokens_would_lose_the_first(monkeypatch):
    """The rule that was wrong once."""

    def by_beginnings(tokenizer, text):
        ids, offsets = tokenizer.encode_with_offsets(text)
        starts = [start for start, _ in offsets]
        return ids, lambda place: bisect.bisect_left(starts, place), lambda place: bisect.bisect_left(starts, place)

    monkeypatch.setattr(chat_template, "token_borders", by_beginnings)
    with pytest.raises(AssertionError):
        test_the_token_across_prompt_and_reply_carries_loss(SPACED, "then it is", " the", False, True)


def template_text(template, question, reply):
    return f"Q: {question} A:{'' if template == SPACED else chr(10)}{' ' if template == SPACED else ''}{reply}</s>"


def _with_merges(backend, text):
    """The tokenizer with `text` as one token more."""
    state = json.loads(backend.to_str())
    word = "".join({" ": "Ġ", "\n": "Ċ"}.get(char, char) for char in text)
    vocab = state["model"]["vocab"]
    merges = []
    for end in range(2, len(word) + 1):
        if word[:end] not in vocab:
            vocab[word[:end]] = 1000 + end
        merges.append([word[: end - 1], word[end - 1]])
    state["model"]["merges"] = merges + [m for m in state["model"]["merges"] if m not in merges]
    state["pre_tokenizer"]["use_regex"] = False
    return Tokenizer.from_str(json.dumps(state))


def test_templates_for_tools_have_marks_of_their_own():
    """Transformers takes the template `tool_use` where tools are given: its marks count, or its lack of them."""
    tools = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    given = Conversation(MESSAGES, tools='[{"name": "f"}]')
    expected = [ROLES[1]["content"] + "<|im_end|>", ROLES[3]["content"] + "<|im_end|>"]
    for default, tool_use, end in ((GENERATION, CHATML_TEMPLATE, "\n"), (CHATML_TEMPLATE, GENERATION + prompt, "")):
        templates = {"default": default, "tool_use": tools + tool_use}
        renderer = ChatTemplateRenderer(chatml_tokenizer(chat_template=templates))
        assert _targets(renderer, given) == [text + end for text in expected]
    unended = tools + "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    renderer = ChatTemplateRenderer(chatml_tokenizer(chat_template={"default": CHATML_TEMPLATE, "tool_use": unended}))
    with pytest.raises(UserError, match="template for tools ends replies in another way"):
        renderer.turns(given)
    with pytest.raises(UserError, match="no default chat template"):
        ChatTemplateRenderer(chatml_tokenizer(chat_template={"other": CHATML_TEMPLATE}))
