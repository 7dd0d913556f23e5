"""AGIEval in its original layout: both languages, chosen and written answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import request
from mindspeed_llm.tasks.evaluation.benchmarks.agieval import BENCHMARK, SUBJECTS, load
from mindspeed_llm.tasks.evaluation.requests import Generate
from tests.tasks.evaluation import lm_eval_files
from tests.tasks.evaluation.models import Constant, assert_oracle_is_right, constant_result, judged


def _item(number: int, **more: object) -> dict:
    options = [f"({letter}){number * factor}" for letter, factor in zip("ABCD", (1, 2, 3, 4), strict=True)]
    item = {"passage": None, "question": f"{number} + {number} = ?", "options": options, "label": "B", "answer": None}
    return {**item, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "sat-math": [_item(number, label="ABCD"[number % 4]) for number in range(4)],
        "lsat-ar": [_item(3, passage="Three friends meet. ")],
        "gaokao-physics": [_item(5, question="五加五等于", label=["B", "C"])],
        "jec-qa-kd": [_item(6, question="六加六等于", label="AD")],
        "gaokao-mathcloze": [_item(7, question="$7+7=$", options=None, label=None, answer="$14$")],
        "math": [_item(8, question="What is half?", options=None, label=None, answer=r"$\frac{1}{2}$")],
    }
    for name, items in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return tmp_path


def test_whole_requests(folder: Path) -> None:
    """The wording is that of the zero-shot prompts in the benchmark's repository, written out by hand."""
    asked = {subject.name: request(BENCHMARK, subject, subject.documents[0]) for subject in load(folder)}
    assert asked["lsat-ar"].context == (
        "Three friends meet. Q: 3 + 3 = ? Answer Choices: (A)3 (B)6 (C)9 (D)12\nA: Among A through D, the answer is"
    )
    assert asked["lsat-ar"].continuations == (" (A)3", " (B)6", " (C)9", " (D)12")
    assert asked["gaokao-physics"].context == (
        "问题：五加五等于 选项：(A)5 (B)10 (C)15 (D)20\n答案：从A到D, 我们应选择"
    )
    assert asked["math"] == Generate(prompt="Q: What is half?\nA: The answer is", stop=("Q:",), max_new_tokens=32)
    assert asked["gaokao-mathcloze"].prompt == "问题：$7+7=$\n答案："


def test_any_of_several_right_options_counts(folder: Path) -> None:
    subjects = {subject.name: subject for subject in load(folder)}
    for name, right in (("gaokao-physics", {1, 2}), ("jec-qa-kd", {0, 3})):
        subject = subjects[name]
        for chosen in range(4):
            raw = [-1.0 if position == chosen else -50.0 for position in range(4)]
            sample = judged(BENCHMARK, subject, subject.documents[0], raw)
            assert sample.correct == {"acc": chosen in right, "acc_norm": chosen in right}


def test_an_oracle_is_right_and_a_constant_has_its_chance(folder: Path) -> None:
    subjects = load(folder)
    result = constant_result(BENCHMARK, subjects, " 14")
    assert result.subjects["sat-math"]["acc"].accuracy == 0.25
    assert {name: part["acc"].correct for name, part in result.subjects.items() if "acc_norm" not in part} == {
        "gaokao-mathcloze": 1,
        "math": 0,
    }
    assert (result.total["acc"].total, result.total["acc_norm"].total) == (9, 7)
    assert constant_result(BENCHMARK, subjects, Constant().text).total["acc"].correct == 2
    chosen = [subject for subject in subjects if subject.answer is None]
    assert_oracle_is_right(BENCHMARK, chosen)
    assert_oracle_is_right(BENCHMARK, [subject for subject in subjects if subject.answer], but=["acc_norm"])


def test_stops_and_metrics_are_those_of_lm_eval(folder: Path) -> None:
    written = lm_eval_files.task("agieval/gaokao-mathcloze.yaml")
    (subject,) = load(folder / "gaokao-mathcloze.jsonl")
    assert list(subject.answer.stop) == written["generation_kwargs"]["until"]
    assert subject.answer.max_new_tokens == written["generation_kwargs"]["max_gen_toks"]
    chosen = lm_eval_files.task("agieval/sat-math.yaml")
    assert [metric["metric"] for metric in chosen["metric_list"]] == list(BENCHMARK.answer.metrics)
    names = {
        task["task"].removeprefix("agieval_").replace("_", "-")
        for task in lm_eval_files.tasks("agieval/*.yaml")
        if "dataset_path" in task
    }
    assert names == set(SUBJECTS)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("sat-math", {"label": "E"}, "field 'label' is 'E', expected letters out of A, B, C, D"),
        ("sat-math", {"label": None}, "field 'label' is None, expected letters"),
        ("sat-math", {"options": None}, "field 'options' is None, expected a list"),
        ("sat-math", {"options": ["(A)1"] * 8}, "expected at most 7 texts"),
        ("math", {"answer": None}, "field 'answer' is None, expected a text"),
        ("math", {"passage": 3}, "field 'passage' is 3, expected a text"),
    ],
)
def test_a_malformed_row_is_named(folder: Path, name: str, change: dict, said: str) -> None:
    file = folder / f"{name}.jsonl"
    file.write_text("\n" + json.dumps(_item(9, answer="1", **change) if "answer" not in change else _item(9, **change)))
    with pytest.raises(UserError) as caught:
        load(folder)
    assert f"{name}.jsonl, line 2: " in str(caught.value)
    assert said in str(caught.value)


def test_a_strange_subject_is_named(folder: Path) -> None:
    (folder / "math.jsonl").rename(folder / "maths.jsonl")
    with pytest.raises(UserError, match=r"maths.jsonl is named after none of agieval's subjects"):
        load(folder)


def test_the_shared_files_are_read() -> None:
    shared = Path(__file__).parents[5] / "shared/data/eval/agieval"
    if not shared.exists():
        pytest.skip("the shared data are not here")
    assert [subject.name for subject in load(shared) if subject.answer] == ["gaokao-mathcloze"]
    assert len(load(shared)) == 5
