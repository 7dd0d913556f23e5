"""BoolQ in its original layout, against lm-eval's task file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import request
from mindspeed_llm.tasks.evaluation.benchmarks.boolq import BENCHMARK, load
from mindspeed_llm.tasks.evaluation.filters import INVALID
from tests.tasks.evaluation import lm_eval_files
from tests.tasks.evaluation.models import assert_oracle_is_right, constant_result


def _item(number: int) -> dict:
    return {
        "question": f"is {number} an even number",
        "title": "Numbers",
        "answer": number % 2 == 0,
        "passage": f"The number {number} follows {number - 1}.",
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for name in ("dev", "train"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(_item(number)) + "\n" for number in range(1, 9)))
    return tmp_path / "dev.jsonl"


def test_requests_are_those_of_lm_eval(file: Path) -> None:
    task = lm_eval_files.task("super_glue/boolq/default.yaml")
    (subject,) = load(file.parent)
    for document in subject.documents:
        asked = request(BENCHMARK, subject, document)
        assert asked.context == lm_eval_files.render(task["doc_to_text"], dict(document.fields))
        assert asked.continuations == tuple(f" {choice}" for choice in task["doc_to_choice"])
        # The label of lm-eval's copy of the data is 1 for true.
        assert BENCHMARK.answer.gold(document.fields) == (int(_item(document.index + 1)["answer"]),)


def test_a_whole_request(file: Path) -> None:
    (subject,) = load(file)
    asked = request(BENCHMARK, subject, subject.documents[0])
    assert asked.context == "The number 1 follows 0.\nQuestion: is 1 an even number?\nAnswer:"
    assert asked.continuations == (" no", " yes")
    assert BENCHMARK.target(subject.documents[0].fields) == "no"


def test_an_oracle_is_right_and_a_constant_has_a_chance_of_one_half(file: Path) -> None:
    subjects = load(file)
    assert_oracle_is_right(BENCHMARK, subjects)
    assert constant_result(BENCHMARK, subjects).total["acc"].accuracy == 0.5


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is A.", "yes"),
        ("B", "no"),
        ("(B) No", "no"),
        ("No, the answer is A", "yes"),
        ("Yes, hepatitis B is contagious.", "yes"),
        ("**Yes.** Vitamin B is found in it.", "yes"),
        ("No. The (A) road", "no"),
        ("I would take (B), yes", "no"),
        ("The passage says yes.", "yes"),
        ("Nobody knows", INVALID),
        ("", INVALID),
    ],
)
def test_an_answer_in_words_is_read_by_what_it_says_first(text: str, answer: str) -> None:
    (reading,) = BENCHMARK.variants["alternative-prompt"].answer.readings
    assert reading.extract(text) == answer


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answer": "true"}, "field 'answer' is 'true', expected true or false"),
        ({"passage": " "}, "field 'passage' is ' ', expected a text that is not empty"),
    ],
)
def test_a_malformed_row_is_named(file: Path, change: dict, said: str) -> None:
    with file.open("a") as stream:
        stream.write(json.dumps({**_item(9), **change}) + "\n")
    with pytest.raises(UserError) as caught:
        load(file)
    assert f"dev.jsonl, line 9: {said}" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"passage": "\\ud800"}', "field 'passage' holds \\ud800 at character 0, one half of a surrogate pair"),
        ('{"more": [{"\\uDC00": 1}]}', "the name '\\udc00' in field 'more'[0] holds \\udc00 at character 0, one half"),
        ('{"\\ud800": 1}', "field '\\ud800' holds \\ud800 at character 0, one half of a surrogate pair"),
        (f'{{"more": {"7" * 5000}}}', "a number has too many digits"),
        (f'{{"more": {"[" * 100_000}{"]" * 100_000}}}', "lists or objects are nested too deeply"),
        ('{"more": ]}', "no JSON at column 10"),
    ],
)
def test_json_that_python_cannot_hold_is_named(file: Path, line: str, said: str) -> None:
    # Both halves are a character.
    whole = json.dumps({**_item(9), "passage": "\N{GRINNING FACE}"})
    assert "\\ud83d\\ude00" in whole
    with file.open("a") as stream:
        stream.write(f"{whole}\n{line}\n")
    with pytest.raises(UserError) as caught:
        load(file)
    assert f"dev.jsonl, line 10: {said}" in str(caught.value)
    str(caught.value).encode()


def test_several_files_that_fit_are_named(file: Path) -> None:
    file.rename(file.with_name("a_dev.jsonl"))
    file.with_name("b_dev.jsonl").write_text("")
    with pytest.raises(UserError, match=r"a_dev.jsonl, b_dev.jsonl"):
        load(file.parent)
    with pytest.raises(UserError, match=r"b_dev.jsonl holds no questions"):
        load(file.with_name("b_dev.jsonl"))
