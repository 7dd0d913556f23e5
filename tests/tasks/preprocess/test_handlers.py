"""Every handler against samples that are spelled out here and encoded by transformers, and the table of handlers."""

import json

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.dataset_info import resolve_datasets
from mindspeed_llm.tasks.preprocess.handlers import HANDLERS, WorkOptions, find_handler, make_work, with_entries
from mindspeed_llm.tasks.preprocess.mixing import mixed_records
from tests.tasks.preprocess.pieces import IGNORED, R, bpe_tokenizer, run, sequences, spelled, text_of

ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "The city"}}},
}
CALL = {"name": "get_weather", "arguments": {"city": "Zürich"}}
PLAIN_TOOLS = (
    "You have access to the following tools:\n> Tool Name: get_weather\nTool Description: Weather of a city\n"
    "Tool Args:\n  - city (string): The city\n\nUse the following format if using a tool:\n```\n"
    "Action: tool name (one of [get_weather]).\nAction Input: the input to the tool, in a JSON format representing "
    'the kwargs (e.g. ```{"input": "hello world", "num_beams": 5}```).\n```\n'
)


def _user(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


ALPACA = {
    "instruction": "Translate:",
    "input": "good evening",
    "output": "bonsoir 🙂",
    "history": [["hi", "Hello!"], ["谢谢", "不客气"]],
    "system": "Be brief.",
}
ALPACA_PIECES = [
    "<|im_start|>system\nBe brief.<|im_end|>\n", _user("hi"), R("Hello!"), R("<|im_end|>"),
    "\n", _user("谢谢"), R("不客气"), R("<|im_end|>"),
    "\n", _user("Translate:\ngood evening"), R("bonsoir 🙂"), R("<|im_end|>"),
]  # fmt: skip
SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Use tools."},
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": '{"temp": 18}'},
        {"from": "gpt", "value": "18 degrees"},
    ],
    "tools": json.dumps([TOOL]),
}
SHAREGPT_PIECES = [
    f"<|im_start|>system\nUse tools.{PLAIN_TOOLS}<|im_end|>\n", _user("Weather?"),
    R('Action: get_weather\nAction Input: {"city": "Zürich"}'), R("<|im_end|>"),
    "\n", '<|im_start|>tool\n{"temp": 18}<|im_end|>\n<|im_start|>assistant\n', R("18 degrees"), R("<|im_end|>"),
]  # fmt: skip
OPENAI = {
    "messages": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"temp": 18}'},
        {"role": "assistant", "content": "18 degrees"},
    ],
    "tools": [{"type": "function", "function": TOOL}],
}
HUNYUAN = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "that is all"},
    ]
}
HUNYUAN_PIECES = [
    "<|startoftext|>", "Be brief.<|extra_4|>", "hi<|extra_0|>", R("Hello!<|eos|>"),
    "<|startoftext|>", "and?<|extra_0|>", R("that is all<|eos|>"),
]  # fmt: skip
GENERAL_PIECES = [
    ALPACA_SYSTEM, "### Instruction:\nTranslate:\ngood evening\n\n### Response:\n", R("bonsoir 🙂"), R("</s>")
]  # fmt: skip
CHAT_PIECES = [
    ALPACA_SYSTEM, "### Instruction:\nhi\n\n### Response:\n", R("Hello!"), R("</s>"),
    "\n\n", "### Instruction:\nand?\n\n### Response:\n", R("that is all"), R("</s>"),
]  # fmt: skip
MOSS = {
    "conversation_id": 1,
    "chat": {
        "turn_1": {"Human": "<|Human|>: hi<eoh>\n", "Inner Thoughts": "None<eot>", "MOSS": "<|MOSS|>: Hello!<eom>\n"},
        "turn_2": {"Human": "and?", "MOSS": "that is all"},
        "turn_3": None,
    },
}
BELLE = {"instruction": "Human:hi\nAssistant: Hello!\nHuman:and?\nAssistant:", "input": "", "output": "that is all"}
LEETCODE = {
    "code_with_problem": "# Two Sum\nGiven nums ...\n```python\npass\n```",
    "code_only": "def f(): ...",
    "explanation_only": "One pass.",
}
LEETCODE_PIECES = [
    ALPACA_SYSTEM, "### Instruction:\n# Two Sum\nGiven nums ...\n\n### Response:\n", R("def f(): ...\nOne pass."),
    R("</s>"),
]  # fmt: skip

INSTRUCTION_CASES = [
    ("AlpacaStyleInstructionHandler", {"prompt_type": "chatml"}, ALPACA, ALPACA_PIECES),
    ("SharegptStyleInstructionHandler", {"prompt_type": "chatml"}, SHAREGPT, SHAREGPT_PIECES),
    ("OpenAIInstructionHandler", {"prompt_type": "chatml"}, OPENAI, SHAREGPT_PIECES),
    ("HunyuanInstructionHandler", {}, HUNYUAN, HUNYUAN_PIECES),
    ("HunyuanInstructionHandler", {"prompt_type": "hunyuan"}, HUNYUAN, HUNYUAN_PIECES),
    (
        "GeneralInstructionHandler",
        {},
        {key: ALPACA[key] for key in ("instruction", "input", "output")},
        GENERAL_PIECES,
    ),
    ("BelleMultiTurnInstructionHandler", {}, BELLE, CHAT_PIECES),
    ("MOSSInstructionHandler", {}, MOSS, CHAT_PIECES),
    ("LeetcodePythonInstructionHandler", {}, LEETCODE, LEETCODE_PIECES),
]


@pytest.mark.parametrize(("name", "options", "record", "pieces"), INSTRUCTION_CASES)
def test_instruction_handlers(name, options, record, pieces):
    tokenizer = bpe_tokenizer()
    ids, labels = spelled(tokenizer, pieces)
    chunk = run(name, tokenizer, record, record, **options)
    assert sequences(chunk, "input_ids") == [ids, ids]
    assert sequences(chunk, "labels") == [labels, labels]
    assert sequences(chunk, "attention_mask") == [[1] * len(ids)] * 2
    assert tokenizer.decode(chunk.arrays["input_ids"]) == text_of(pieces) * 2
    assert chunk.num_targets == 2 * sum(label != IGNORED for label in labels)
    assert not chunk.skipped and not chunk.empty_replies


def test_moss_in_the_template_of_baichuan():
    """An efficient end mark: the reply is closed by the label of the next question's first token."""
    tokenizer = bpe_tokenizer()
    pieces = ["<reserved_106>hi<reserved_107>", R("Hello!"), "<reserved_106>and?<reserved_107>", R("that is all")]
    ids, labels = spelled(tokenizer, [*pieces, R("</s>")])
    labels[ids.index(tokenizer.convert_tokens_to_ids("<reserved_106>"), 1)] = tokenizer.eos_token_id
    chunk = run("MOSSMultiTurnHandler", tokenizer, MOSS)
    assert sequences(chunk, "input_ids") == [ids]
    assert sequences(chunk, "labels") == [labels]


OWN_TEMPLATE = (
    "{%- if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool.function.name }}: "
    "{{ tool.function.description }}\n{% endfor %}<|im_end|>\n{%- endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.role == 'assistant' %}{% generation %}"
    "{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content or '' }}{%- for call in message.tool_calls or [] %}"
    "{{ call.function.name }}={{ call.function.arguments | tojson }};{% endfor %}<|im_end|>{% endgeneration %}\n"
    "{%- else %}{{ message.content }}<|im_end|>\n{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


@pytest.mark.parametrize("marked", [True, False])
def test_openai_records_in_the_tokenizers_own_template(marked):
    """Ids and answer-only masks are those of apply_chat_template, with and without marks for replies."""
    messages = [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather in two cities?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "two calls",
            "tool_calls": [{"type": "function", "function": CALL} for _ in range(2)],
        },
        {"role": "tool", "tool_call_id": "a", "content": "18"},
        {"role": "tool", "tool_call_id": "b", "content": "19"},
        {"role": "assistant", "content": "18 and 19 🙂"},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": "welcome"},
    ]
    tools = [{"type": "function", "function": TOOL}]
    tokenizer = bpe_tokenizer(chat_template=OWN_TEMPLATE)
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    labels = [token if has_loss else IGNORED for token, has_loss in zip(ids, mask, strict=True)]
    if not marked:
        plain = OWN_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        tokenizer = bpe_tokenizer(chat_template=plain)
    chunk = run("OpenAIInstructionHandler", tokenizer, {"messages": messages, "tools": tools})
    assert sequences(chunk, "input_ids") == [ids]
    assert sequences(chunk, "labels") == [labels]


HUNYUAN_TEMPLATE = (
    "{%- for m in messages %}{%- if m.role == 'system' %}<|startoftext|>{{ m.content }}<|extra_4|>"
    "{%- elif m.role == 'user' %}{%- if loop.index0 != 1 or messages[0].role != 'system' %}<|startoftext|>{%- endif %}"
    "{{ m.content }}<|extra_0|>{%- else %}{{ m.content }}<|eos|>{%- endif %}{%- endfor %}"
)


def test_hunyuan_with_the_tokenizers_template_trains_what_follows_its_marks():
    tokenizer = bpe_tokenizer(chat_template=HUNYUAN_TEMPLATE)
    ids = tokenizer.apply_chat_template(HUNYUAN["messages"], tokenize=True, return_dict=True)["input_ids"]
    begin, end = tokenizer.convert_tokens_to_ids(["<|extra_0|>", "<|eos|>"])
    labels, in_reply = [], False
    for token in ids:
        labels.append(token if in_reply else IGNORED)
        in_reply = token == begin or (in_reply and token != end)
    chunk = run("HunyuanInstructionHandler", tokenizer, HUNYUAN)
    assert sequences(chunk, "input_ids") == [ids]
    assert sequences(chunk, "labels") == [labels]


PAIR_PROMPT = ["<|im_start|>system\nBe brief.<|im_end|>\n", _user("hi"), "Hello!", "<|im_end|>", "\n", _user("and?")]
ALPACA_PAIR = {
    "question": "and?",
    "history": [["hi", "Hello!"]],
    "system": "Be brief.",
    "chosen": "that is all",
    "rejected": "no 🙂",
}
SHAREGPT_PAIR = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "Hello!"},
        {"from": "human", "value": "and?"},
    ],
    "chosen": {"from": "gpt", "value": "that is all"},
    "rejected": {"from": "gpt", "value": "no 🙂"},
}
PAIRWISE_CASES = [
    ("AlpacaStylePairwiseHandler", ALPACA_PAIR, {"columns": {"prompt": "question", "query": None}}),
    ("SharegptStylePairwiseHandler", SHAREGPT_PAIR, {}),
    (
        "AlpacaStylePairwiseHandler",
        {**ALPACA_PAIR, "chosen": ["that is all"], "rejected": ["no 🙂"]},
        {"columns": {"prompt": "question"}},
    ),
    (
        "AlpacaStylePairwiseHandler",
        {**ALPACA_PAIR, "answers": ["that is all", "no 🙂"]},
        {"columns": {"prompt": "question", "chosen": "answers", "rejected": "answers"}},
    ),
]


@pytest.mark.parametrize(("name", "record", "options"), PAIRWISE_CASES)
def test_pairwise_handlers(name, record, options):
    tokenizer = bpe_tokenizer()
    chunk = run(name, tokenizer, record, record, prompt_type="chatml", **options)
    for side, reply in (("chosen", "that is all"), ("rejected", "no 🙂")):
        pieces = [*PAIR_PROMPT, R(reply), R("<|im_end|>")]
        ids, labels = spelled(tokenizer, pieces)
        assert sequences(chunk, f"{side}_input_ids") == [ids, ids]
        assert sequences(chunk, f"{side}_labels") == [labels, labels]
        assert tokenizer.decode(ids) == text_of(pieces)


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("PPOAlpacaStyleInstructionHandler", {**ALPACA, "answer": "bon"}),
        ("R1AlpacaStyleInstructionHandler", {**ALPACA, "answer": "bon"}),
        (
            "R1SharegptStyleInstructionHandler",
            {
                "conversations": [
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "Hello!"},
                    {"from": "human", "value": "谢谢"},
                    {"from": "gpt", "value": "不客气"},
                    {"from": "human", "value": "Translate:\ngood evening"},
                    {"from": "gpt", "value": "bonsoir 🙂"},
                ],
                "system": "Be brief.",
                "answer": "bon",
            },
        ),
    ],
)
def test_prompt_handlers(name, record):
    """Earlier turns are part of the prompt; the answer and further columns are plain ids."""
    tokenizer = bpe_tokenizer()
    ids, _ = spelled(tokenizer, ALPACA_PIECES[:-2])
    further = {"additional_keys": ("labels", "answer")} if name.startswith("R1") else {}
    chunk = run(name, tokenizer, record, prompt_type="chatml", **further)
    assert sequences(chunk, "input_ids") == [ids]
    assert sequences(chunk, "attention_mask") == [[1] * len(ids)]
    if not further:
        assert list(chunk.arrays) == ["input_ids", "attention_mask"]
        return
    assert sequences(chunk, "labels") == [tokenizer.encode("bonsoir 🙂", add_special_tokens=False)]
    assert sequences(chunk, "answer") == [tokenizer.encode("bon", add_special_tokens=False)]
    alone = run(name, tokenizer, record, prompt_type="chatml")
    assert list(alone.arrays) == ["input_ids", "attention_mask"] and sequences(alone, "input_ids") == [ids]


def test_prompts_need_no_answer():
    tokenizer = bpe_tokenizer()
    expected = tokenizer.encode(_user("hi"), add_special_tokens=False)
    for name, record in (
        ("PPOAlpacaStyleInstructionHandler", {"instruction": "hi"}),
        ("R1AlpacaStyleInstructionHandler", {"instruction": "hi"}),
        ("R1SharegptStyleInstructionHandler", {"conversations": [{"from": "human", "value": "hi"}]}),
    ):
        assert sequences(run(name, tokenizer, record, prompt_type="chatml"), "input_ids") == [expected]
        if name.startswith("PPO"):
            continue
        with pytest.raises(UserError, match=r"data\.jsonl:1: .*(no key 'output'|does not end with a reply)"):
            run(name, tokenizer, record, prompt_type="chatml", additional_keys=("labels",))


PRETRAIN_CASES = [
    ("GeneralPretrainHandler", {"text": "a text 🙂\nof two lines"}, {"text": "a text 🙂\nof two lines"}, {}),
    (
        "GeneralPretrainHandler",
        {"title": "T", "body": "B b"},
        {"title": "T", "body": "B b"},
        {"json_keys": ("title", "body")},
    ),
    (
        "SharegptPretrainHandler",
        {"talk": [{"from": "human", "value": "hi "}, {"role": "assistant", "content": "Hello!"}]},
        {"talk": "hi Hello!"},
        {"json_keys": ("talk",)},
    ),
    (
        "StackOverflowPythonPretrainHandler",
        {"title": "sort a list", "question_body": "How?", "answer_body": "sorted(x)"},
        {"text": "In python, sort a list\n### Question:\nHow?\n### Response:\nsorted(x)\n"},
        {},
    ),
]
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions.USER: Below is an instruction that describes a task. Write a response "
    "that appropriately completes the request.\n\n### Instruction:\n"
)
PRETRAIN_CASES += [
    (
        "AlpacaPretrainHandler",
        {"instruction": "Add.", "input": query, "output": "3"},
        {"text": f"{VICUNA}Add.\n\n{part}### Response: ASSISTANT: 3"},
        {},
    )
    for query, part in (("1+2", "### Input:\n1+2\n\n"), ("", ""))
]


@pytest.mark.parametrize(("name", "record", "texts", "options"), PRETRAIN_CASES)
def test_pretrain_handlers(name, record, texts, options):
    tokenizer = bpe_tokenizer()
    chunk = run(name, tokenizer, record, record, append_eod=True, **options)
    assert list(chunk.arrays) == list(texts)
    for key, text in texts.items():
        ids = tokenizer(text)["input_ids"]
        assert sequences(chunk, key) == [[*ids, tokenizer.eos_token_id]] * 2
        assert tokenizer.decode(ids) == text


@pytest.fixture
def data_sets(tmp_path):
    """One data set of each layout, and one of pairs, in a folder with dataset_info.json."""
    contents = {"a": ALPACA, "s": SHAREGPT, "o": OPENAI, "p": SHAREGPT_PAIR, "q": ALPACA_PAIR}
    for name, record in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps([record, record]))
    info = {
        "a": {"file_name": "a.json"},
        "s": {"file_name": "s.json", "formatting": "sharegpt"},
        "o": {"file_name": "o.json", "formatting": "openai"},
        "p": {"file_name": "p.json", "formatting": "sharegpt", "ranking": True},
        "q": {"file_name": "q.json", "ranking": True, "columns": {"prompt": "question"}},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path


def _from_info(data_sets, names):
    entries = tuple(resolve_datasets(names, data_sets, field="--input", dir_field="--dataset-dir", preference=True))
    handler = with_entries(find_handler("LlamaFactoryInstructionHandler"), entries)
    work = make_work(handler, bpe_tokenizer(), WorkOptions(prompt_type="chatml", entries=entries))
    return work(list(mixed_records(entries, "interleave_under")))


def test_data_sets_by_name(data_sets):
    """Records of several layouts, mixed, are what the handler of each layout makes of them."""
    tokenizer = bpe_tokenizer()
    alpaca, sharegpt = (spelled(tokenizer, pieces) for pieces in (ALPACA_PIECES, SHAREGPT_PIECES))
    chunk = _from_info(data_sets, "a,s,o")
    assert sequences(chunk, "input_ids") == [alpaca[0], sharegpt[0], sharegpt[0]] * 2
    assert sequences(chunk, "labels") == [alpaca[1], sharegpt[1], sharegpt[1]] * 2


def test_data_sets_of_pairs(data_sets):
    chunk = _from_info(data_sets, "p,q")
    chosen, _ = spelled(bpe_tokenizer(), [*PAIR_PROMPT, "that is all", "<|im_end|>"])
    assert sequences(chunk, "chosen_input_ids") == [chosen] * 4
    with pytest.raises(UserError, match=r"--input: p hold preference pairs .* and a do not"):
        _from_info(data_sets, "a,p")


def test_declarations_are_small_and_whole():
    assert len(HANDLERS) == 19
    kinds = [handler.kind for handler in HANDLERS.values()]
    assert {kind: kinds.count(kind) for kind in kinds} == {"pretrain": 4, "instruction": 10, "pairwise": 2, "prompt": 3}
    tested = {case[0] for case in (*INSTRUCTION_CASES, *PAIRWISE_CASES, *PRETRAIN_CASES)}
    tested |= {"MOSSMultiTurnHandler", "LlamaFactoryInstructionHandler", "PPOAlpacaStyleInstructionHandler"}
    tested |= {"R1AlpacaStyleInstructionHandler", "R1SharegptStyleInstructionHandler"}
    assert tested == set(HANDLERS)


def test_names():
    assert find_handler("").name == "GeneralPretrainHandler"
    with pytest.raises(
        UserError, match=r"--handler-name 'AlpacaInstructionHandler': .*did you mean AlpacaStyleInstr.*expected one of"
    ):
        find_handler("AlpacaInstructionHandler")
