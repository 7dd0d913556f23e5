"""CMMLU in its original layout, against lm-eval's task files."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import context, request
from mindspeed_llm.tasks.evaluation.benchmarks.cmmlu import BENCHMARK, load
from mindspeed_llm.tasks.evaluation.benchmarks.cmmlu_subjects import NAMES
from tests.tasks.evaluation import lm_eval_files
from tests.tasks.evaluation.models import assert_oracle_is_right, constant_result

HEADER = ["", "Question", "A", "B", "C", "D", "Answer"]


def _row(number: int) -> list:
    return [
        number,
        f"{number}加{number}等于多少，请选 ",
        number,
        2 * number + 7,
        "不知道",
        2 * number,
        "DABC"[number % 4],
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count, first in (("test", 8, 0), ("dev", 5, 100)):
        (tmp_path / split).mkdir()
        with (tmp_path / split / "logical.csv").open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([HEADER, *(_row(number) for number in range(first, first + count))])
    return tmp_path / "test"


def test_the_whole_prompt(folder: Path) -> None:
    (subject,) = load(folder)
    assert context(BENCHMARK, subject, subject.documents[1], 1) == (
        "以下是关于逻辑学的单项选择题，请直接给出正确答案的选项。\n\n"
        "100加100等于多少，请选\nA. 100\nB. 207\nC. 不知道\nD. 200\n答案： D\n\n"
        "1加1等于多少，请选\nA. 1\nB. 9\nC. 不知道\nD. 2\n答案："
    )
    assert context(BENCHMARK, subject, subject.documents[1]).count("答案：") == 6


def test_requests_are_those_of_lm_eval(folder: Path) -> None:
    task = lm_eval_files.task("cmmlu/cmmlu_logical.yaml")
    (subject,) = load(folder)
    for document in subject.documents:
        row = dict(zip(HEADER, map(str, _row(document.index)), strict=True))
        del row[""]
        assert BENCHMARK.prompt(document.fields) == lm_eval_files.render(task["doc_to_text"], row)
        assert str(BENCHMARK.answer.gold(document.fields)[0]) == lm_eval_files.render(task["doc_to_target"], row)
        asked = request(BENCHMARK, subject, document)
        assert asked.continuations == tuple(f" {choice}" for choice in task["doc_to_choice"])


def test_every_subject_is_described_as_lm_eval_does(folder: Path) -> None:
    tasks = [task for task in lm_eval_files.tasks("cmmlu/cmmlu_*.yaml") if "dataset_name" in task]
    assert {task["dataset_name"] for task in tasks} == set(NAMES)
    for split in (folder, folder.parent / "dev"):
        text = (split / "logical.csv").read_text(encoding="utf-8")
        for name in NAMES:
            (split / f"{name}.csv").write_text(text, encoding="utf-8")
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
        ("8,问,1,2,3,4,E", "field 'Answer' is 'E', expected one of the letters A, B, C, D"),
        ("8,问,1,2,3,A", "6 columns, expected 7"),
        ("8,,1,2,3,4,A", "field 'Question' is '', expected a text"),
    ],
)
def test_a_malformed_row_is_named(folder: Path, line: str, said: str) -> None:
    with (folder / "logical.csv").open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")
    with pytest.raises(UserError) as caught:
        load(folder)
    assert f"logical.csv, line 10: {said}" in str(caught.value)


def test_a_file_without_the_columns_and_a_strange_subject_are_named(folder: Path) -> None:
    (folder / "logical.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="line 2: field 'Question' is nothing"):
        load(folder)
    for split in (folder, folder.parent / "dev"):
        (split / "logical.csv").write_text(",Question,A,B,C,D,Answer\n0,问,1,2,3,4,A\n", encoding="utf-8")
        (split / "logical.csv").rename(split / "cooking.csv")
    with pytest.raises(UserError, match=r"cooking.csv is named after none of the benchmark's 67 subjects"):
        load(folder)


def test_the_shared_files_are_read() -> None:
    shared = Path(__file__).parents[5] / "shared/data/eval/cmmlu/test"
    if not shared.exists():
        pytest.skip("the shared data are not here")
    assert [len(subject.shots) for subject in load(shared)] == [5] * 8
