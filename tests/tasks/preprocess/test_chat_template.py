"""The tokenizer's own chat template: ids equal transformers' apply_chat_template, masks cover the replies."""

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chat_template import ChatTemplateRenderer
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from tests.support.tokenizers import CHATML_TEMPLATE, chatml_tokenizer

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


def test_template_that_rewrites_history_is_refused_unless_only_the_last_reply_counts():
    tokenizer = chatml_tokenizer(chat_template=REWRITING)
    messages = [MESSAGES[0], Message("assistant", "<think>t</think>a"), *MESSAGES[2:]]
    with pytest.raises(UserError, match=r"set data\.mask_history"):
        ChatTemplateRenderer(tokenizer).turns(Conversation(messages))
    (turn,) = ChatTemplateRenderer(tokenizer, last_only=True).turns(Conversation(messages))
    assert tokenizer.decode(turn.target) == "r 🙂<|im_end|>\n"
    assert "<think>" not in tokenizer.decode(turn.source)


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
