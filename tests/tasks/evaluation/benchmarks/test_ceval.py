"""C-Eval in its original layout, against lm-eval's task files."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import context, request
from mindspeed_llm.tasks.evaluation.benchmarks.ceval import BENCHMARK, load
from mindspeed_llm.tasks.evaluation.benchmarks.ceval_subjects import NAMES
from tests.tasks.evaluation import lm_eval_files
from tests.tasks.evaluation.models import assert_oracle_is_right, constant_result

HEADER = ["id", "question", "A", "B", "C", "D", "answer"]


def _row(number: int) -> list:
    return [number, f" {number}的两倍是____。", 2 * number, number + 1, "零", "其他", "ABCD"[number % 4]]


def _write(folder: Path, subject: str) -> None:
    for split, count, first in (("val", 8, 0), ("dev", 5, 100)):
        (folder / split).mkdir(exist_ok=True)
        # The examples of the distribution are explained in one more column.
        more = [["explanation"], *[["因为如此。"]] * count] if split == "dev" else [[]] * (count + 1)
        rows = [HEADER, *(_row(number) for number in range(first, first + count))]
        with (folder / split / f"{subject}_{split}.csv").open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([*row, *extra] for row, extra in zip(rows, more, strict=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _write(tmp_path, "logic")
    return tmp_path / "val"


def test_the_whole_prompt(folder: Path) -> None:
    (subject,) = load(folder)
    assert context(BENCHMARK, subject, subject.documents[1], 1) == (
        "以下是中国关于逻辑学的单项选择题，请选出其中的正确答案。\n\n"
        "100的两倍是____。\nA. 200\nB. 101\nC. 零\nD. 其他\n答案： A\n\n"
        "1的两倍是____。\nA. 2\nB. 2\nC. 零\nD. 其他\n答案："
    )


def test_requests_are_those_of_lm_eval(folder: Path) -> None:
    task = lm_eval_files.task("ceval/ceval-valid_logic.yaml")
    (subject,) = load(folder)
    for document in subject.documents:
        row = dict(zip(HEADER, map(str, _row(document.index)), strict=True))
        assert BENCHMARK.prompt(document.fields) == lm_eval_files.render(task["doc_to_text"], row)
        assert str(BENCHMARK.answer.gold(document.fields)[0]) == lm_eval_files.render(task["doc_to_target"], row)
        asked = request(BENCHMARK, subject, document)
        assert asked.continuations == tuple(f" {choice}" for choice in task["doc_to_choice"])


def test_every_subject_is_described_as_lm_eval_does(folder: Path) -> None:
    tasks = lm_eval_files.tasks("ceval/ceval-valid_*.yaml")
    assert {task["dataset_name"] for task in tasks} == set(NAMES)
    for name in NAMES:
        _write(folder.parent, name)
    assert {subject.name: subject.description for subject in load(folder)} == {
        task["dataset_name"]: task["description"] for task in tasks
    }


def test_an_oracle_is_right_and_a_constant_has_a_chance_of_one_in_four(folder: Path) -> None:
    subjects = load(folder)
    assert_oracle_is_right(BENCHMARK, subjects)
    assert constant_result(BENCHMARK, subjects).total["acc"].accuracy == 0.25


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("8,问,1,2,3,4,", "field 'answer' is '', expected one of the letters A, B, C, D"),
        ("8,问,1,2,3,4,A,因为", "8 columns, expected 7"),
        ("8,问,1,2,3,,A", "field 'D' is '', expected a text"),
    ],
)
def test_a_malformed_row_is_named(folder: Path, line: str, said: str) -> None:
    with (folder / "logic_val.csv").open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")
    with pytest.raises(UserError) as caught:
        load(folder)
    assert f"logic_val.csv, line 10: {said}" in str(caught.value)


def test_a_strange_subject_is_named(folder: Path) -> None:
    _write(folder.parent, "cooking")
    with pytest.raises(UserError, match=r"cooking_val.csv is named after none of the benchmark's 52 subjects"):
        load(folder)
