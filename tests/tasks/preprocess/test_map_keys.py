"""--map-keys: names are checked against the handler and the records; what is not named keeps its default."""

from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.handlers import find_handler
from mindspeed_llm.tasks.preprocess.map_keys import check_columns, parse_map_keys
from mindspeed_llm.tasks.preprocess.readers import Record
from tests.tasks.preprocess.pieces import R, bpe_tokenizer, run, sequences, spelled

ALPACA, SHAREGPT = "AlpacaStyleInstructionHandler", "SharegptStyleInstructionHandler"


def _parse(text, name=ALPACA):
    return parse_map_keys(text, find_handler(name))


def test_given_names_only():
    assert _parse('{"prompt": "question", "query": "", "system": null}') == (
        {"prompt": "question", "query": None, "system": None},
        {},
    )
    text = '{"messages": "talk", "tags": {"user_tag": "U"}}'
    assert _parse(text, SHAREGPT) == ({"messages": "talk"}, {"user_tag": "U"})


def test_names_that_are_not_given_keep_their_defaults():
    """Columns and tags are filled up key by key."""
    tokenizer = bpe_tokenizer()
    expected, _ = spelled(
        tokenizer, ["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", R("b"), R("<|im_end|>")]
    )
    columns, tags = _parse('{"messages": "talk", "tags": {"user_tag": "U"}}', SHAREGPT)
    record = {"talk": [{"from": "U", "value": "a"}, {"from": "gpt", "value": "b"}]}
    chunk = run(SHAREGPT, tokenizer, record, prompt_type="chatml", columns=columns, tags=tags)
    assert sequences(chunk, "input_ids") == [expected]
    columns, tags = _parse('{"prompt": "question", "query": ""}')
    record = {"question": "a", "input": "not read", "output": "b"}
    chunk = run(ALPACA, tokenizer, record, prompt_type="chatml", columns=columns, tags=tags)
    assert sequences(chunk, "input_ids") == [expected]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (ALPACA, "{", r"--map-keys: not valid JSON \(.* character"),
        (ALPACA, "[]", "--map-keys: expected an object such as"),
        (ALPACA, '{"promt": "q"}', "unknown key 'promt'; did you mean 'prompt'?"),
        (ALPACA, '{"prompt": 3}', "key 'prompt': expected the name of a column, found 3"),
        (ALPACA, '{"chosen": "c"}', "unknown key 'chosen'; .*expected some of prompt"),
        (ALPACA, '{"tags": {}}', "unknown key 'tags'"),
        ("AlpacaStylePairwiseHandler", '{"response": "c"}', "unknown key 'response'"),
        (SHAREGPT, '{"kto_tag": "k"}', "unknown key 'kto_tag'"),
        (SHAREGPT, '{"tags": {"user": "k"}}', "tags: unknown key 'user'; did you mean 'user_tag'?"),
        (SHAREGPT, '{"tags": "x"}', "tags: expected an object"),
        ("GeneralPretrainHandler", '{"text": "t"}', "--map-keys has no effect .*: --json-keys names the columns"),
        ("LlamaFactoryInstructionHandler", '{"text": "t"}', "has no effect .*: dataset_info.json names the columns"),
    ],
)
def test_mistakes(name, text, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?").replace("[]", r"\[\]")):
        _parse(text, name)


def test_columns_must_stand_in_some_record():
    records = [Record(Path("a.jsonl"), 1, {"question": "a"}), Record(Path("a.jsonl"), 2, {"sys": "b"})]
    check_columns({"prompt": "question", "system": "sys", "query": None}, iter(records))
    with pytest.raises(
        UserError,
        match=r"--map-keys: key 'system': no record has a column 'syss'; did you mean 'sys'\? they have question, sys",
    ):
        check_columns({"prompt": "question", "system": "syss"}, records)


def test_handlers_know_the_roles_that_they_read():
    roles = {name: set(find_handler(name).columns) for name in (ALPACA, "AlpacaPretrainHandler")}
    assert roles["AlpacaPretrainHandler"] == {"prompt", "query", "response"}
    assert roles[ALPACA] == {"prompt", "query", "response", "history", "system", "tools"}
    assert set(find_handler("AlpacaStylePairwiseHandler").columns) == roles[ALPACA] - {"response"} | {
        "chosen",
        "rejected",
    }
    assert set(find_handler("StackOverflowPythonPretrainHandler").columns) == {"title", "question", "answer"}
