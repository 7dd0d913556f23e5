"""GSM8K: prompt and readings against lm-eval's task file, numbers against a table and against labelled solutions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import context
from mindspeed_llm.tasks.evaluation.benchmarks.gsm8k import BENCHMARK, load
from mindspeed_llm.tasks.evaluation.filters import INVALID
from mindspeed_llm.tasks.evaluation.numbers import final_number, same_number
from tests.tasks.evaluation import lm_eval_files
from tests.tasks.evaluation.models import assert_oracle_is_right, constant_result

SOLUTIONS = Path(__file__).parents[5] / "shared/data/eval/gsm8k_model_solutions.jsonl"


def _item(number: int) -> dict[str, str]:
    answer = f"Two baskets hold {number} each.\nThat is 2 * {number} = {2 * number:,}.\n#### {2 * number:,}"
    return {"question": f"A basket holds {number} pears. How many do two hold?", "answer": answer}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, numbers in (("test", (3, 40, 700, 9)), ("train", range(10, 16)), ("train_socratic", range(3))):
        text = "".join(json.dumps(_item(number)) + "\n" for number in numbers)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is $29.00", "29"),
        ("It costs 29.", "29"),
        ("There are 57,500", "57500"),
        ("The answer is -3", "-3"),
        ("He eats 1/2", "1/2"),
        ("#### 18.0", "18"),
        ("#### 18\n\nQuestion: How many of 7 are left?\nAnswer: 7 - 2 = 5\n#### 5", "18"),
        (r"So we get \boxed{18} of the 20.", "18"),
        ("I do not know.", INVALID),
        ("", INVALID),
        # Not asked for, but met in answers: a subtraction, dollars below zero, a bare decimal part, a list.
        ("That leaves 16-3", "3"),
        ("He owes -$4.50", "-9/2"),
        ("It is .5 of it", "1/2"),
        ("They are 1, 2", "2"),
        # A dash and a subtraction are no signs; fractions in LaTeX are numbers.
        ("Left are:\n- 18", "18"),
        ("That is 20 - 5", "5"),
        ("x = -5", "-5"),
        (r"So \boxed{\frac{1}{2}} of the 20.", "1/2"),
        (r"So \boxed{-\frac{3}{4}}", "-3/4"),
        (r"\boxed{1{,}000}", "1000"),
        # A model that repeats itself.
        pytest.param("9" * 5000, INVALID, id="digits"),
        pytest.param("It is 7. 0." + "3" * 5000, "7", id="decimals"),
        pytest.param("It is 7. 5/" + "7" * 5000, "7", id="denominator"),
    ],
)
def test_the_number_of_an_answer(text: str, number: str) -> None:
    assert final_number(text) == number


def test_numbers_are_compared_by_value() -> None:
    assert same_number(final_number("It is 18.0"), "Some steps.\n#### 18")
    assert same_number(final_number("$57,500.00"), "#### 57500")
    assert not same_number(final_number("18"), "#### 180")
    assert not same_number(INVALID, "no number at all")


def test_verdicts_on_labelled_solutions_equal_the_labels() -> None:
    """All 600 labels of the file are met; there are no exceptions to list."""
    if not SOLUTIONS.exists():
        pytest.skip("the shared data are not here")
    wrong, count = [], 0
    for number, line in enumerate(SOLUTIONS.read_text(encoding="utf-8").splitlines(), start=1):
        record = json.loads(line)
        for model, solution in record.items():
            if isinstance(solution, dict):
                count += 1
                verdict = same_number(final_number(solution["solution"]), record["ground_truth"])
                if verdict != solution["is_correct"]:
                    wrong.append((number, model))
    assert count == 600
    assert not wrong


@pytest.mark.parametrize(
    ("solution", "is_correct"),
    [
        ("She has 3 * 4 = <<3*4=12>>12 eggs\nShe sells them for 12 * $2 = $<<12*2=24>>24\nA: 24", True),
        ("She has 12 eggs and sells 24 of them\nA: 12", False),
        ("She sells 12 eggs for $24.00", True),
        ("She sells 12 eggs.", False),
    ],
)
def test_verdicts_on_solutions_of_our_own(solution: str, is_correct: bool) -> None:
    assert same_number(final_number(solution), "She sells 12 eggs for $<<12*2=24>>24\nA: 24") is is_correct


def test_prompt_readings_and_stops_are_those_of_lm_eval(folder: Path) -> None:
    task = lm_eval_files.task("gsm8k/gsm8k.yaml")
    (subject,) = load(folder)
    fields = dict(subject.documents[0].fields)
    assert BENCHMARK.prompt(fields) == lm_eval_files.render(task["doc_to_text"], fields)
    assert BENCHMARK.target(fields) == lm_eval_files.render(task["doc_to_target"], fields)
    assert list(BENCHMARK.answer.stop) == task["generation_kwargs"]["until"]
    assert BENCHMARK.num_fewshot == task["num_fewshot"]
    assert [reading["name"] for reading in task["filter_list"]] == list(BENCHMARK.answer.metrics[:2])


def test_reasoning_step_by_step(folder: Path) -> None:
    reasoning = BENCHMARK.variants["chain-of-thought"]
    task = lm_eval_files.task("gsm8k/gsm8k-cot.yaml")
    (subject,) = load(folder)
    assert context(reasoning, subject, subject.documents[0], 1) == (
        "Question: A basket holds 10 pears. How many do two hold?\nLet's think step by step.\nAnswer: Two baskets hold "
        "10 each. That is 2 * 10 = 20. The answer is 20.\n\n"
        "Question: A basket holds 3 pears. How many do two hold?\nLet's think step by step.\nAnswer:"
    )
    pattern = next(one for one in task["filter_list"] if one["name"] == "strict-match")["filter"][0]["regex_pattern"]
    strict = reasoning.answer.readings[0]
    assert strict.name == "strict-match"
    for text in ("So it is 6. The answer is 6.", "The answer is $6.", "The answer is 1,400. ", "6"):
        assert strict.extract(text) == next(iter(re.findall(pattern, text)), INVALID)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    # Worked out by hand from lm-eval's patterns.
    [
        (" It is 6.\n#### 6", "6", "6"),
        (" It is $1,400.", INVALID, "$1,400."),
        ("#### -3 and 4", "-3", "4"),
        ("#### 18.0", "18.0", "18.0"),
        ("none", INVALID, INVALID),
    ],
)
def test_readings(text: str, strict: str, flexible: str) -> None:
    readings = {reading.name: reading for reading in BENCHMARK.answer.readings}
    assert readings["strict-match"].extract(text) == strict
    assert readings["flexible-extract"].extract(text) == flexible


def test_digits_are_compared_without_signs_of_money_and_thousands() -> None:
    matches = BENCHMARK.answer.readings[1].matches
    assert matches("$1,400.", "#### 1400")
    assert matches("1400", "Steps #### of 3.\n#### 1,400")
    assert not matches("18.0", "#### 18")  # lm-eval's rule, kept; the reading "number" forgives it


def test_the_whole_prompt(folder: Path) -> None:
    (subject,) = load(folder)
    text = context(BENCHMARK, subject, subject.documents[0], 1)
    assert text == (
        "Question: A basket holds 10 pears. How many do two hold?\nAnswer: Two baskets hold 10 each.\n"
        "That is 2 * 10 = 20.\n#### 20\n\nQuestion: A basket holds 3 pears. How many do two hold?\nAnswer:"
    )


def test_an_oracle_is_right_and_a_constant_has_no_chance(folder: Path) -> None:
    subjects = load(folder)
    assert_oracle_is_right(BENCHMARK, subjects)
    result = constant_result(BENCHMARK, subjects, " The answer is 18.\n#### 18")
    assert {metric: score.correct for metric, score in result.total.items()} == {
        "strict-match": 1,  # one of the four is 18
        "flexible-extract": 1,
        "number": 1,
    }
    assert constant_result(BENCHMARK, subjects, "So.").total["number"].correct == 0


def test_questions_in_a_folder_of_their_own(folder: Path) -> None:
    (folder / "test").mkdir()
    (folder / "test.jsonl").rename(folder / "test" / "gsm8k-test.jsonl")
    (subject,) = load(folder / "test")
    assert len(subject.documents) == 4
    assert subject.shots[0].fields == _item(10)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "Q?"}', "field 'answer' is nothing"),
        ('{"question": 3, "answer": "#### 3"}', "field 'question' is 3, expected a text"),
        ('{"question": "Q?", "answer": "18"}', "field 'answer' is '18', expected a worked answer"),
        ('{"question": "Q?", "answer": "#### x"}', "field 'answer' is '#### x', expected a worked answer"),
        ('{"question": ', "no JSON at column"),
        ('["Q?"]', "a list, expected an object"),
    ],
)
def test_a_malformed_row_is_named(folder: Path, line: str, said: str) -> None:
    with (folder / "test.jsonl").open("a") as stream:
        stream.write("\n" + line + "\n")
    with pytest.raises(UserError) as caught:
        load(folder)
    assert f"test.jsonl, line 6: {said}" in str(caught.value)


def test_missing_files_and_too_few_examples_are_named(folder: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load(folder / "nowhere")
    (folder / "train.jsonl").write_text(json.dumps(_item(1)) + "\n")
    (subject,) = load(folder)
    with pytest.raises(UserError, match="5 examples are asked for a prompt, its files hold 1"):
        context(BENCHMARK, subject, subject.documents[0])
    (folder / "test.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no questions"):
        load(folder)
