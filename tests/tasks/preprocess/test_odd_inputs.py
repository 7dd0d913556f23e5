"""What becomes of odd records, one test each: nothing is dropped unseen, and every mistake names file, line and key."""

import json
import pickle
import re
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.chunks import Summary
from mindspeed_llm.tasks.preprocess.handlers import WorkOptions, find_handler, make_work
from mindspeed_llm.tasks.preprocess.readers import Record, iterate_records
from mindspeed_llm.tasks.preprocess.records import EMPTY_PROMPT, BadRecord
from mindspeed_llm.tasks.preprocess.samples import NO_ROOM
from tests.tasks.preprocess.pieces import IGNORED, R, bpe_tokenizer, run, sequences, spelled

GOOD = {"instruction": "hi", "output": "Hello!"}
ALPACA = "AlpacaStyleInstructionHandler"
SHAREGPT = "SharegptStyleInstructionHandler"
PAIRWISE = "AlpacaStylePairwiseHandler"
PROMPT = "R1AlpacaStyleInstructionHandler"


def _pieces(question="hi", answer="Hello!"):
    return [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", R(answer), R("<|im_end|>")]


def _talk(*roles):
    return {"conversations": [{"from": role, "value": "text"} for role in roles]}


@pytest.mark.parametrize("blank", ["", " ", "\n\t\u3000"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_questions_without_text_are_counted_wherever_they_stand(blank, place):
    tokenizer = bpe_tokenizer()
    records = [GOOD, GOOD]
    records.insert(place, {"instruction": blank, "input": blank, "output": "a", "chosen": "a", "rejected": "b"})
    for name in (ALPACA, PROMPT):
        chunk = run(name, tokenizer, *records, prompt_type="chatml")
        assert chunk.skipped == [(EMPTY_PROMPT, f"data.jsonl:{place + 1}")]
        assert len(chunk.lengths["input_ids"]) == 2


@pytest.mark.parametrize("text", ["", " \n "])
def test_documents_without_text_are_counted(text):
    tokenizer = bpe_tokenizer()
    for records in ([text, "a text"], ["a text", text]):
        chunk = run("GeneralPretrainHandler", tokenizer, *({"text": item} for item in records))
        assert sequences(chunk, "text") == [tokenizer("a text")["input_ids"]]
        assert [where for _, where in chunk.skipped] == [f"data.jsonl:{records.index(text) + 1}"]


def test_a_turn_without_text_in_a_conversation_is_counted():
    talk = {"conversations": [{"from": "human", "value": " "}, {"from": "gpt", "value": "a"}]}
    assert run(SHAREGPT, bpe_tokenizer(), talk, prompt_type="chatml").skipped == [(EMPTY_PROMPT, "data.jsonl:1")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("final", [True, False])
def test_encoding_and_line_ends_of_files_change_nothing(tmp_path, encoding, line_end, final):
    lines = [json.dumps(GOOD), json.dumps({"instruction": "谢谢", "output": "不客气 🙂"}, ensure_ascii=False)]
    file = tmp_path / "data.jsonl"
    file.write_bytes((line_end.join(lines) + line_end * final).encode(encoding))
    tokenizer = bpe_tokenizer()
    work = make_work(find_handler(ALPACA), tokenizer, WorkOptions(prompt_type="chatml"))
    expected = [spelled(tokenizer, _pieces()), spelled(tokenizer, _pieces("谢谢", "不客气 🙂"))]
    assert sequences(work(list(iterate_records(file))), "input_ids") == [ids for ids, _ in expected]


@pytest.mark.parametrize(
    ("name", "record", "message", "kind"),
    [
        (ALPACA, {"instruction": "q"}, r"no key 'output' \(the response column\)", "missing key 'output'"),
        (ALPACA, {**GOOD, "output": None}, "key 'output': expected text, found null", "key 'output' is not text"),
        (ALPACA, {**GOOD, "output": 3}, "key 'output': expected text, found int 3", "key 'output' is not text"),
        (ALPACA, {**GOOD, "instruction": ["q"]}, "key 'instruction': expected text, found list", "key 'instruction' "),
        (ALPACA, {**GOOD, "history": "x"}, "key 'history': expected a list", "key 'history' is not a list"),
        (ALPACA, {**GOOD, "system": 1}, "key 'system': expected text, found int", "key 'system' is not text"),
        (ALPACA, {**GOOD, "tools": 1}, "key 'tools': expected a list of tools", "key 'tools' is not a list of tools"),
        (ALPACA, {**GOOD, "tools": "{"}, "tools: not valid JSON", "tools: not valid JSON"),
        (ALPACA, {**GOOD, "output": "\ud800"}, "half of a surrogate", "key 'output' holds half of a surrogate pair"),
        (SHAREGPT, {"conversations": None}, "key 'conversations': expected a list, found null", "key 'conversations' "),
        (SHAREGPT, {"conversations": ["x"]}, "expected a list of objects, found str", "key 'conversations' is not a l"),
        (
            SHAREGPT,
            {"conversations": [{"from": "human"}]},
            "a message has no key 'value'",
            "a message has no key 'value'",
        ),
        (SHAREGPT, {"conversations": [{"from": "human", "value": None}]}, "key 'value': expected text", "key 'value'"),
        (PAIRWISE, {**GOOD, "chosen": "a"}, "no key 'rejected'", "missing key 'rejected'"),
        (PAIRWISE, {**GOOD, "chosen": ["a", "b"], "rejected": "c"}, "a list of one text", "key 'chosen' is not text"),
        (PAIRWISE, {**GOOD, "chosen": [1], "rejected": "c"}, "key 'chosen': expected text", "key 'chosen' is not text"),
        (PROMPT, {"output": "a"}, "no key 'instruction'", "missing key 'instruction'"),
        ("MOSSInstructionHandler", {"chat": "x"}, "turns with the keys Human and MOSS", "key 'chat' is not turns"),
        (
            "MOSSInstructionHandler",
            {"chat": {"turn_1": {"Human": "x"}}},
            "no key 'MOSS'",
            "a message has no key 'MOSS'",
        ),
        ("GeneralPretrainHandler", {"body": "x"}, "no key 'text'", "missing key 'text'"),
        ("GeneralPretrainHandler", {"text": None}, "key 'text': expected text, found null", "key 'text' is not text"),
        ("GeneralPretrainHandler", {"text": 5}, "key 'text': expected text, found int", "key 'text' is not text"),
        ("GeneralPretrainHandler", {"text": ["a"]}, "key 'text': expected text, found list", "key 'text' is not text"),
        ("AlpacaPretrainHandler", {"instruction": "a"}, "no key 'output'", "missing key 'output'"),
        ("SharegptPretrainHandler", {"text": "a"}, "key 'text': expected a list", "key 'text' is not a list"),
    ],
)
def test_wrong_structure_ends_the_work_or_is_counted(name, record, message, kind):
    tokenizer = bpe_tokenizer()
    options = {} if "Pretrain" in name or "MOSS" in name else {"prompt_type": "chatml"}
    with pytest.raises(UserError, match=rf"data\.jsonl:1: .*{message}"):
        run(name, tokenizer, record, **options)
    chunk = run(name, tokenizer, record, record, on_bad_record="skip", **options)
    assert {where for _, where in chunk.skipped} == {"data.jsonl:1", "data.jsonl:2"}
    (reason,) = {reason for reason, _ in chunk.skipped}
    assert reason.startswith(f"bad record: {kind}")
    assert all(not len(lengths) for lengths in chunk.lengths.values())


@pytest.mark.parametrize(
    ("record", "kind", "detail"),
    [
        (
            _talk("gpt", "human"),
            "roles out of order",
            ": message 1 is of assistant and is the first, where one of user or observation belongs",
        ),
        (
            _talk("system", "human", "human", "gpt"),
            "roles out of order",
            ": message 3 is of user and follows one of user, where one of assistant or function belongs",
        ),
        (
            _talk("human", "gpt", "gpt"),
            "roles out of order",
            ": message 3 is of assistant and follows one of assistant, where one of user or observation belongs",
        ),
        (
            _talk("human", "gpt", "human"),
            "conversation does not end with a reply",
            ": its last message, 3, is of user",
        ),
        (
            _talk("human", "function_call", "observation"),
            "conversation does not end with a reply",
            ": its last message, 3, is of observation",
        ),
        (
            _talk("human", "robot"),
            "unknown role",
            " 'robot' of message 2; known are human, observation, gpt, function_call, system; `tags` (in --map-keys) "
            "names others",
        ),
        (
            _talk("human", "system", "gpt"),
            "system message that is not the first",
            ": message 2 is of 'system'; put its text in the first, or in the user's",
        ),
        (_talk(), "conversation without messages", ""),
    ],
)
def test_roles_out_of_order_end_the_work_or_are_counted(record, kind, detail):
    tokenizer = bpe_tokenizer()
    good = _talk("human", "gpt")
    with pytest.raises(UserError, match=rf"data\.jsonl:2: {re.escape(kind + detail)}"):
        run(SHAREGPT, tokenizer, good, record, prompt_type="chatml")
    chunk = run(SHAREGPT, tokenizer, good, record, good, prompt_type="chatml", on_bad_record="skip")
    # What is the record's own stands with the place, so that reasons stay few.
    place = f"data.jsonl:2 ({kind}{detail})" if detail else "data.jsonl:2"
    assert chunk.skipped == [(kind, place)] and len(chunk.lengths["labels"]) == 2


@pytest.mark.parametrize("mistake", ["tool left out", "tools no JSON", "no function", "unknown role", "result alone"])
def test_reasons_are_few_whatever_the_records_hold(mistake):
    """Summaries and memory would grow with the input otherwise; what one record says follows the first places."""

    def record(number):
        talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a{number}"}]
        tools = {
            "tool left out": [{"name": f"tool{number}"}],
            "tools no JSON": f"{'[' * number} tool{number}",
            "no function": [{"tool": number}],
        }.get(mistake, "")
        if mistake == "unknown role":
            talk[0]["role"] = f"role{number}"
        if mistake == "result alone":
            talk = [{"role": "tool", "content": f"r{number}"}, *talk[1:]]
        return {"messages": talk, "tools": tools}

    plain = "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
    chosen = {"tool left out": None, "result alone": "gpt_oss"}.get(mistake, "chatml")
    tokenizer = bpe_tokenizer(chat_template=plain + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|call|>", "<|return|>"]}
    )
    chunk = run(
        "OpenAIInstructionHandler", tokenizer, *map(record, range(1, 31)), prompt_type=chosen, on_bad_record="skip"
    )
    summary = Summary()
    summary.add(chunk)
    ((reason, count),) = summary.skipped.items()
    assert count == 30 and not any(character.isdigit() for character in reason)
    places = summary.first_skipped[reason]
    assert [place.split(" ")[0] for place in places] == [f"data.jsonl:{line}" for line in (1, 2, 3)]
    detail = {"tool left out": "leaves out the tool 'tool2'", "unknown role": "unknown role 'role2'"}.get(mistake, "")
    assert detail in places[1]


def test_replies_where_questions_belong_in_pairs():
    chosen = {"from": "gpt", "value": "a"}
    name = "SharegptStylePairwiseHandler"
    for record, reason in (
        ({**_talk("human", "gpt"), "chosen": chosen, "rejected": chosen}, "does not end with a question"),
        ({**_talk("human"), "chosen": chosen, "rejected": {"from": "human", "value": "x"}}, "is not a reply"),
    ):
        with pytest.raises(UserError, match=rf"data\.jsonl:1: .*{reason}"):
            run(name, bpe_tokenizer(), record, prompt_type="chatml")


@pytest.mark.parametrize("name", [ALPACA, PAIRWISE, PROMPT])
def test_a_prompt_that_leaves_no_room_for_the_answer_is_counted(name):
    tokenizer = bpe_tokenizer()
    prompt, _ = spelled(tokenizer, _pieces()[:1])
    record = {**GOOD, "chosen": "a", "rejected": "b"}
    long = {**record, "instruction": "hi " * 50}
    key = "chosen_input_ids" if name == PAIRWISE else "input_ids"
    chunk = run(name, tokenizer, record, long, record, prompt_type="chatml", seq_length=len(prompt) + 3)
    assert chunk.skipped == [(NO_ROOM, "data.jsonl:2")] and len(chunk.lengths[key]) == 2
    for length, is_left in ((len(prompt), False), (len(prompt) + 1, True)):
        chunk = run(name, tokenizer, record, prompt_type="chatml", seq_length=length)
        assert bool(len(chunk.lengths[key])) == is_left and bool(chunk.skipped) != is_left


def test_a_sample_of_exactly_the_length_is_kept():
    tokenizer = bpe_tokenizer()
    ids, _ = spelled(tokenizer, _pieces())
    chunk = run(ALPACA, tokenizer, GOOD, prompt_type="chatml", seq_length=len(ids))
    assert sequences(chunk, "input_ids") == [ids]


def test_an_empty_answer_is_kept_and_counted():
    """It teaches to end the turn at once; who does not want that sees the count."""
    tokenizer = bpe_tokenizer()
    ids, labels = spelled(tokenizer, _pieces(answer=""))
    chunk = run(ALPACA, tokenizer, GOOD, {**GOOD, "output": ""}, prompt_type="chatml")
    assert sequences(chunk, "input_ids")[1] == ids and sequences(chunk, "labels")[1] == labels
    assert sum(label != IGNORED for label in labels) == 1
    assert (chunk.empty_replies, chunk.skipped) == (1, [])
    pair = {"instruction": "hi", "chosen": "a", "rejected": " "}
    assert run(PAIRWISE, tokenizer, pair, prompt_type="chatml").empty_replies == 1


def test_an_empty_answer_that_is_asked_for_is_counted():
    chunk = run(PROMPT, bpe_tokenizer(), {**GOOD, "output": " "}, prompt_type="chatml", additional_keys=("labels",))
    assert chunk.skipped == [("empty text for the key 'labels'", "data.jsonl:1")]


def test_a_tokenizer_without_eos():
    tokenizer = bpe_tokenizer(eos=None)
    # A template with an end mark of its own needs none.
    ids, labels = spelled(tokenizer, _pieces())
    chunk = run(ALPACA, tokenizer, GOOD, prompt_type="chatml")
    assert (sequences(chunk, "input_ids"), sequences(chunk, "labels")) == ([ids], [labels])
    with pytest.raises(UserError, match=r"template 'default' ends replies with the tokenizer's eos token, but .* none"):
        run(ALPACA, tokenizer, GOOD, prompt_type="default")
    # Where a template brings an end mark, --append-eod appends that; else there is none to append.
    assert run(ALPACA, tokenizer, GOOD, prompt_type="chatml", append_eod=True).num_targets == chunk.num_targets
    with pytest.raises(UserError, match="--append-eod: the tokenizer has no eos token"):
        run(ALPACA, tokenizer, GOOD, prompt_type="hunyuan", append_eod=True)
    with pytest.raises(UserError, match=r"append.eod.* the tokenizer has no eos token"):
        run("GeneralPretrainHandler", tokenizer, {"text": "a"}, append_eod=True)


def test_a_tokenizer_without_bos():
    """Templates that begin with the tokenizer's begin token leave it out."""
    with_bos, without = bpe_tokenizer(), bpe_tokenizer(bos=None)
    expected = run(ALPACA, with_bos, GOOD, prompt_type="llama3")
    chunk = run(ALPACA, without, GOOD, prompt_type="llama3")
    texts = [t.decode(c.arrays["input_ids"]) for t, c in ((with_bos, expected), (without, chunk))]
    assert texts[0] == "<s>" + texts[1]


def test_pad_that_is_eos_keeps_the_label_of_the_last_eos():
    tokenizer = bpe_tokenizer(pad="</s>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    chunk = run("GeneralInstructionHandler", tokenizer, GOOD)
    assert chunk.arrays["labels"][-1] == tokenizer.eos_token_id


def test_append_eod_ends_each_sample_once():
    tokenizer = bpe_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    # qwen_lf ends replies in a line end: the eos token, which is the template's end mark, follows it.
    plain = run(ALPACA, tokenizer, GOOD, prompt_type="qwen_lf")
    chunk = run(ALPACA, tokenizer, GOOD, prompt_type="qwen_lf", append_eod=True)
    assert chunk.arrays["input_ids"].tolist() == [*plain.arrays["input_ids"].tolist(), end]
    assert chunk.arrays["labels"].tolist() == [*plain.arrays["labels"].tolist(), end]
    assert chunk.arrays["attention_mask"].tolist() == [1] * len(chunk.arrays["input_ids"])
    length = len(plain.arrays["input_ids"])
    cut = run(ALPACA, tokenizer, GOOD, prompt_type="qwen_lf", append_eod=True, seq_length=length)
    # Without the line end there is room for the eos token: the end mark is that token.
    assert cut.arrays["input_ids"].tolist() == plain.arrays["input_ids"].tolist()[:-1]
    assert cut.arrays["input_ids"][-1] == cut.arrays["labels"][-1] == end
    # chatml ends replies in it already.
    once = run(ALPACA, tokenizer, GOOD, prompt_type="chatml", append_eod=True)
    assert sequences(once, "input_ids") == [spelled(tokenizer, _pieces())[0]]


def test_markers_of_placeholders_in_content_are_text():
    tokenizer = bpe_tokenizer()
    chunk = run(ALPACA, tokenizer, {"instruction": "{{idx}} {{content}}", "output": "{{name}}"}, prompt_type="chatml")
    assert sequences(chunk, "input_ids") == [spelled(tokenizer, _pieces("{{idx}} {{content}}", "{{name}}"))[0]]


def test_no_tools_in_a_tools_column():
    tokenizer = bpe_tokenizer()
    for tools in (None, "", "[]", []):
        chunk = run(ALPACA, tokenizer, {**GOOD, "tools": tools}, prompt_type="chatml")
        assert sequences(chunk, "input_ids") == [spelled(tokenizer, _pieces())[0]]


def test_work_and_its_errors_travel_between_processes():
    tokenizer = bpe_tokenizer()
    for name in (ALPACA, PAIRWISE, PROMPT, "AlpacaPretrainHandler"):
        options = {} if "Pretrain" in name else {"prompt_type": "chatml"}
        work = make_work(find_handler(name), tokenizer, WorkOptions(**options))
        record = Record(Path("a.jsonl"), 1, {**GOOD, "chosen": "a", "rejected": "b"})
        first, second = work([record]), pickle.loads(pickle.dumps(work))([record])
        assert all((first.arrays[key] == second.arrays[key]).all() for key in work.keys)
    error = pickle.loads(pickle.dumps(BadRecord("a.jsonl:1: no", "kind")))
    assert (str(error), error.kind) == ("a.jsonl:1: no", "kind")
