"""BIG-Bench Hard in its original layout, with and without the folder of prompts, against lm-eval's task files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import context
from mindspeed_llm.tasks.evaluation.benchmarks.bbh import BENCHMARK, load
from mindspeed_llm.tasks.evaluation.filters import INVALID
from tests.tasks.evaluation import lm_eval_files
from tests.tasks.evaluation.models import assert_oracle_is_right, constant_result, judged


def _boolean(number: int) -> dict[str, str]:
    return {"input": "not " * number + "True is", "target": str(number % 2 == 0)}


def _choice(number: int) -> dict[str, str]:
    return {
        "input": f"Which is more?\nOptions:\n(A) {number}\n(B) {3 + (-1) ** number * 7 + number - 3}",
        "target": "(B)" if number % 2 == 0 else "(A)",
    }


REASONING = BENCHMARK.variants["chain-of-thought"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bbh = tmp_path / "bbh"
    bbh.mkdir()
    for name, make in (("boolean_expressions", _boolean), ("snarks", _choice)):
        content = {"canary": "a notice", "examples": [make(number) for number in range(6)]}
        (bbh / f"{name}.json").write_text(json.dumps(content))
    return bbh


@pytest.fixture
def prompts(folder: Path) -> Path:
    """A prompt file as the benchmark's own: a notice, a rule, a description, worked examples."""
    prompts = folder.parent / "cot-prompts"
    prompts.mkdir()
    for name, make in (("boolean_expressions", _boolean), ("snarks", _choice)):
        worked = "\n\n".join(
            f"Q: {make(number)['input']}\nA: Let's think step by step.\nThe answer is near.\n"
            f"So the answer is {make(number)['target']}."
            for number in range(10, 13)
        )
        (prompts / f"{name}.txt").write_text(f"A notice.\n-----\nFind what is true.\nTake care.\n\n{worked}")
    return prompts


def test_examples_of_the_subtask_itself_leave_out_the_one_asked(folder: Path) -> None:
    subject = load(folder)[0]
    second, last = (context(BENCHMARK, subject, subject.documents[index]) for index in (1, 5))
    zero, one, two, three = (f"Q: {_boolean(number)['input']}\nA: {_boolean(number)['target']}" for number in range(4))
    assert second == "\n\n".join([zero, two, three, "Q: not True is\nA:"])
    assert last == "\n\n".join([zero, one, two, "Q: not not not not not True is\nA:"])


@pytest.mark.usefixtures("prompts")
def test_examples_of_the_prompt_file_show_the_results_alone(folder: Path) -> None:
    subject = load(folder)[1]
    assert [dict(shot.fields) for shot in subject.shots] == [
        {**_choice(number), "worked": f"The answer is near.\nSo the answer is {_choice(number)['target']}."}
        for number in range(10, 13)
    ]
    text = context(BENCHMARK, subject, subject.documents[0], 1)
    assert text == (
        "Find what is true.\nTake care.\n\nQ: Which is more?\nOptions:\n(A) 10\n(B) 17\nA: (B)\n\n"
        "Q: Which is more?\nOptions:\n(A) 0\n(B) 7\nA:"
    )


def test_prompts_made_of_lm_evals_examples_are_lm_evals(folder: Path) -> None:
    """A prompt file with the worked examples of lm-eval gives the description and the short examples of lm-eval."""
    tasks = lm_eval_files.tasks("bbh/fewshot/*.yaml")
    worked = {
        task["dataset_name"]: task
        for task in lm_eval_files.tasks("bbh/cot_fewshot/*.yaml")
        if "task" in task and "dataset_name" in task
    }
    prompts = folder.parent / "cot-prompts"
    prompts.mkdir()
    compared = 0
    for task in (task for task in tasks if "dataset_name" in task):
        name, samples = task["dataset_name"], worked[task["dataset_name"]]["fewshot_config"]["samples"]
        questions = "".join(
            f"Q: {sample['input']}\nA: Let's think step by step.\n{sample['target']}\n\n" for sample in samples
        )
        (prompts / f"{name}.txt").write_text(f"Notice.\n-----\n{task['description']}{questions}")
        (folder / f"{name}.json").write_text(json.dumps({"examples": [_boolean(3)]}))
        (subject,) = load(folder / f"{name}.json")
        theirs = task["description"] + "".join(
            f"{lm_eval_files.render(task['doc_to_text'], sample)} {sample['target']}\n\n"
            for sample in task["fewshot_config"]["samples"]
        )
        assert context(BENCHMARK, subject, subject.documents[0]) == theirs + "Q: not not not True is\nA:"
        assert list(BENCHMARK.answer.stop) == task["generation_kwargs"]["until"]
        assert BENCHMARK.num_fewshot == task["num_fewshot"]
        (subject,) = REASONING.load(folder / f"{name}.json")
        theirs = task["description"] + "".join(
            f"{lm_eval_files.render(worked[name]['doc_to_text'], sample)}{sample['target']}\n\n" for sample in samples
        )
        asked = "Q: not not not True is\nA: Let's think step by step.\n"
        assert context(REASONING, subject, subject.documents[0]) == theirs + asked
        assert list(REASONING.answer.stop) == worked[name]["generation_kwargs"]["until"]
        assert REASONING.answer.max_new_tokens == worked[name]["generation_kwargs"]["max_gen_toks"]
        compared += 1
    assert compared == 27


def test_an_oracle_is_right_and_a_constant_has_its_chance(folder: Path) -> None:
    subjects = load(folder)
    # lm-eval's own reading counts the blank before a word as wrong.
    assert_oracle_is_right(BENCHMARK, subjects, but=["none"])
    result = constant_result(BENCHMARK, subjects, " (A)")
    assert [part["first-line"].correct for part in result.subjects.values()] == [0, 3]
    assert constant_result(BENCHMARK, subjects, "True").total["none"].accuracy == 0.25


@pytest.mark.parametrize(
    ("text", "first_line", "none"),
    [
        (" True", True, False),
        ("True", True, True),
        (" true\nfor", True, False),
        ("True.", False, False),
        ("", False, False),
    ],
)
def test_readings(folder: Path, text: str, first_line: bool, none: bool) -> None:
    subject = load(folder)[0]
    document = subject.documents[0]
    sample = judged(BENCHMARK, subject, document, text)
    assert sample.correct == {"first-line": first_line, "none": none}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            '{"examples": [{"input": "a", "target": "b"}, {"input": "a"}]}',
            "item 1 of 'examples': field 'target' is nothing",
        ),
        ('{"examples": [{"input": "a", "target": true}]}', "item 0 of 'examples': field 'target' is True"),
        ('{"examples": [3]}', "item 0 of 'examples': a int, expected an object"),
        ('{"examples": []}', "field 'examples' is empty"),
        ('{"canary": "a"}', "field 'examples' is no list"),
        ('{"examples":\n [}', "line 2: no JSON at column 3"),
        ('{"examples": [{"input": "\\udfff", "target": "b"}]}', "item 0 of 'examples': field 'input' holds \\udfff"),
        (f'{{"canary": {"1" * 5000}}}', "snarks.json: a number has too many digits"),
    ],
)
def test_a_malformed_row_is_named(folder: Path, content: str, said: str) -> None:
    (folder / "snarks.json").write_text(content)
    with pytest.raises(UserError) as caught:
        load(folder)
    assert "snarks.json" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "answer", "get_answer"),
    [
        ("Not of not.\nSo the answer is True.", "True", "True"),
        # lm-eval's pattern takes the last character off, whatever it is.
        ("So the answer is (B)", "(B)", "(B"),
        ("the answer is True, no, the answer is False.", "False", "True, no, the answer is False"),
        ("True", INVALID, INVALID),
    ],
)
def test_readings_of_reasoning(text: str, answer: str, get_answer: str) -> None:
    readings = {reading.name: reading for reading in REASONING.answer.readings}
    assert readings["answer"].extract(text) == answer
    assert readings["get-answer"].extract(text) == get_answer
    assert readings["get-answer"].extract(text) == lm_eval_regex(text)


def lm_eval_regex(text: str) -> str:
    """The pattern of lm-eval's file, applied by hand."""
    (reading,) = lm_eval_files.task("bbh/cot_fewshot/snarks.yaml")["filter_list"]
    found = re.findall(reading["filter"][0]["regex_pattern"], text)
    return found[0].strip() if found else INVALID


def test_reasoning_needs_worked_examples(folder: Path) -> None:
    with pytest.raises(UserError, match=r"there is no cot-prompts/boolean_expressions.txt in .* or beside it"):
        REASONING.load(folder)


def test_a_prompt_file_without_an_answer_is_named(folder: Path, prompts: Path) -> None:
    (prompts / "snarks.txt").write_text("Do.\n\nQ: a\nA: the answer is b.\n\nQ: c\n")
    with pytest.raises(UserError, match=r"snarks.txt, question 1: no line"):
        load(folder)


def test_the_shared_files_are_read() -> None:
    shared = Path(__file__).parents[5] / "shared/data/eval/bbh"
    if not shared.exists():
        pytest.skip("the shared data are not here")
    subjects = load(shared)
    assert [subject.name for subject in subjects] == [
        "boolean_expressions", "date_understanding", "navigate", "object_counting", "snarks", "word_sorting",
    ]  # fmt: skip
    assert sum(len(subject.documents) for subject in subjects) == 1428
