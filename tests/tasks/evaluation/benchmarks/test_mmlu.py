"""MMLU in its original layout: prompts against lm-eval's task files, both ways to answer, and malformed rows."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.benchmark import context, request
from mindspeed_llm.tasks.evaluation.benchmarks.mmlu import MMLU, MMLU_PPL, load
from mindspeed_llm.tasks.evaluation.filters import INVALID
from tests.tasks.evaluation import lm_eval_files
from tests.tasks.evaluation.models import assert_oracle_is_right, constant_result, judged

SUBJECTS = ("anatomy", "high_school_physics")


def _row(number: int) -> list[str]:
    options = [str(number + step) for step in (3, 1, 4, 2)]
    # The right answer moves through the letters.
    answer = "ABCD"[number % 4]
    options["ABCD".index(answer)] = f"{2 * number}"
    return [f' What is {number} + {number}, "all in all"?\nGive one number. ', *options, answer]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("test", 8), ("dev", 5)):
        (tmp_path / split).mkdir()
        for subject in SUBJECTS:
            with (tmp_path / split / f"{subject}_{split}.csv").open("w", newline="") as stream:
                csv.writer(stream).writerows(_row(100 * (split == "dev") + number) for number in range(count))
    return tmp_path / "test"


def test_the_whole_prompt(folder: Path) -> None:
    subject = load(folder)[1]
    text = context(MMLU, subject, subject.documents[1], 1)
    assert text == (
        "The following are multiple choice questions (with answers) about high school physics.\n\n"
        'What is 100 + 100, "all in all"?\nGive one number.\nA. 200\nB. 101\nC. 104\nD. 102\nAnswer: A\n\n'
        'What is 1 + 1, "all in all"?\nGive one number.\nA. 4\nB. 2\nC. 5\nD. 3\nAnswer:'
    )
    assert context(MMLU, subject, subject.documents[1]).count("Answer:") == 6


@pytest.mark.parametrize(("benchmark", "kind"), [(MMLU, "generative"), (MMLU_PPL, "default")])
def test_prompts_are_those_of_lm_eval(folder: Path, benchmark, kind: str) -> None:
    for subject in load(folder):
        task = lm_eval_files.task(f"mmlu/{kind}/mmlu_{subject.name}.yaml")
        assert subject.description == task["description"]
        for document in subject.documents:
            fields = document.fields
            theirs = {
                "question": fields["question"],
                "choices": [fields[letter] for letter in "ABCD"],
                "answer": "ABCD".index(str(fields["answer"])),
            }
            assert benchmark.prompt(fields) == lm_eval_files.render(task["doc_to_text"], theirs)
            if kind == "generative":
                assert benchmark.target(fields) == lm_eval_files.render(task["doc_to_target"], theirs)
                assert list(benchmark.answer.stop) == task["generation_kwargs"]["until"]
            else:
                asked = request(benchmark, subject, document)
                assert asked.continuations == tuple(f" {choice}" for choice in task["doc_to_choice"])


def test_every_subject_is_described_as_lm_eval_does() -> None:
    from mindspeed_llm.tasks.evaluation.benchmarks.mmlu import _description

    tasks = lm_eval_files.tasks("mmlu/default/mmlu_*.yaml")
    assert len(tasks) == 57
    assert {task["dataset_name"]: task["description"] for task in tasks} == {
        task["dataset_name"]: _description(task["dataset_name"]) for task in tasks
    }


def test_an_oracle_is_right_and_a_constant_has_a_chance_of_one_in_four(folder: Path) -> None:
    subjects = load(folder)
    assert_oracle_is_right(MMLU, subjects)
    assert_oracle_is_right(MMLU_PPL, subjects)
    for result in (constant_result(MMLU_PPL, subjects), constant_result(MMLU, subjects, " C")):
        total = result.total[result.headline]
        assert (total.correct, total.total, total.accuracy) == (4, 16, 0.25)
        assert {name: part[result.headline].correct for name, part in result.subjects.items()} == dict.fromkeys(
            SUBJECTS, 2
        )


@pytest.mark.parametrize(
    ("text", "letter", "line", "is_right"),
    [
        (" B", "B", "B", (True, True)),
        (" b.", "B", "b.", (True, True)),
        ("(B)", "B", "(B)", (True, True)),
        (" B. 2", "B", "B. 2", (True, False)),
        (" The answer is C.", "C", "The answer is C.", (False, False)),
        ("", INVALID, "", (False, False)),
    ],
)
def test_reading_a_written_letter(folder: Path, text: str, letter: str, line: str, is_right: tuple) -> None:
    subject = load(folder)[0]
    document = subject.documents[1]
    sample = judged(MMLU, subject, document, text)
    assert sample.extracted == {"letter": letter, "get_response": line}
    assert sample.correct == dict(zip(("letter", "get_response"), is_right, strict=True))


def test_the_likeliest_letter_wins_and_other_answers_are_refused(folder: Path) -> None:
    subject = load(folder)[0]
    document = subject.documents[2]
    sample = judged(MMLU_PPL, subject, document, [-3.0, -2.0, -1.5, -2.5])
    assert (sample.extracted, sample.gold, sample.correct, sample.is_tie) == ({"acc": "C"}, "C", {"acc": True}, False)
    for raw in ([-1.0, -2.0], [-1.0, -2.0, float("nan"), -3.0]):
        with pytest.raises(ValueError, match=r"anatomy_test.csv, line 6: the model gave .* for 4 choices"):
            judged(MMLU_PPL, subject, document, raw)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Q?,1,2,3,4,E", "field 'answer' is 'E', expected one of the letters A, B, C, D"),
        ("Q?,1,2,3,4", "5 columns, expected 6"),
        ("Q?,1,,3,4,A", "field 'B' is '', expected a text that is not empty"),
        ('Q?,"1" 2,2,3,4,A', "no CSV"),
    ],
)
def test_a_malformed_row_is_named(folder: Path, line: str, said: str) -> None:
    with (folder / "anatomy_test.csv").open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(UserError) as caught:
        load(folder)
    assert said in str(caught.value)
    assert "anatomy_test.csv, line 17" in str(caught.value)  # each of the eight rows takes two lines


def test_strange_line_ends_belong_to_a_field_and_strange_bytes_are_named(folder: Path) -> None:
    file = folder / "anatomy_test.csv"
    file.write_text("Q\u2028 and\x0bmore?,1,2,3,4,A\r\n", encoding="utf-8")
    subject = load(folder)[0]
    assert [document.fields["question"] for document in subject.documents] == ["Q\u2028 and\x0bmore?"]
    file.write_bytes("Qü?,1,2,3,4,A\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"anatomy_test.csv: byte 1 is not UTF-8"):
        load(folder)


def test_a_missing_dev_file_and_a_strange_path_are_named(folder: Path) -> None:
    assert [subject.name for subject in load(folder / "anatomy_test.csv")] == ["anatomy"]
    (folder.parent / "dev" / "anatomy_dev.csv").unlink()
    with pytest.raises(UserError, match=r"anatomy_dev.csv does not exist"):
        load(folder)
    with pytest.raises(UserError, match=r"no file <subject>_test.csv"):
        load(folder.parent)


def test_the_shared_files_are_read() -> None:
    shared = Path(__file__).parents[5] / "shared/data/eval/mmlu/test"
    if not shared.exists():
        pytest.skip("the shared data are not here")
    subjects = load(shared)
    assert len(subjects) == 14
    assert all(len(subject.shots) == 5 for subject in subjects)
