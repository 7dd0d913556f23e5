"""NeedleBench in its original layout, with needles and texts of our own."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.arguments import evaluation_arguments
from mindspeed_llm.tasks.evaluation.benchmark import request
from mindspeed_llm.tasks.evaluation.benchmarks.needlebench import BENCHMARK, DEPTHS, NAME, fit, hide, lengths_for, load
from mindspeed_llm.tasks.evaluation.choosing import choose_all
from mindspeed_llm.tasks.evaluation.main import load_tasks
from mindspeed_llm.tasks.evaluation.tasks import fitted
from tests.tasks.evaluation.models import assert_oracle_is_right, constant_result

NEEDLES = [
    {
        "language": language,
        "needle": f"The {colour} key lies in {place}.",
        "retrieval_question": f"Where does the {colour} key lie? Please answer in the format 'It lies in ____'.",
        "gold_standard_answer": f"It lies in {place}.",
        "arg1": colour,
        "arg2": place,
    }
    for language in ("English", "Chinese")
    for colour, place in (("red", "Room 17"), ("blue", "Cellar 4"), ("green", "Tower 9"))
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = [f"word{number}" for number in range(97)]
    texts = [{"text": " ".join(random.Random(seed).choices(words, k=150))} for seed in range(6)]
    for name, rows in (("needles", NEEDLES), ("PaulGrahamEssays", texts), ("zh_finance", texts)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def encode(text: str) -> list[int]:
    """One token for each word."""
    return [hash(word) for word in text.split()]


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [
        (512, (128, 256, 384, 512)),
        (4096, (1000, 2000, 3000, 4000)),
        (40960, (8000, 16000, 24000, 32000)),
        (131072, (32000, 64000, 96000, 128000)),
    ],
)
def test_lengths(positions: int, lengths: tuple[int, ...]) -> None:
    assert lengths_for(positions) == lengths


def test_prompts_fill_their_length_and_hold_the_needle_where_it_belongs(folder: Path) -> None:
    subjects = fit(load(folder), encode, 640, 64)
    assert [subject.name for subject in subjects] == [
        f"{code} {n}" for code in ("en", "zh") for n in (160, 320, 480, 640)
    ]
    for subject, length in zip(subjects, (160, 320, 480, 640) * 2, strict=True):
        assert [document.index for document in subject.documents] == list(range(10 * len(DEPTHS)))
        for document in subject.documents:
            asked = request(BENCHMARK, subject, document)
            size = len(encode(asked.prompt)) + asked.max_new_tokens
            assert length - 3 <= size <= length
            before, _, after = str(document.fields["text"]).partition(str(document.fields["needle"]))
            share = len(before) / len(before + after)
            assert abs(share - int(document.fields["depth"]) / 100) < 0.05
            assert asked.prompt.endswith(("Answer:", "回答："))
    # Which needle and which texts: drawn anew for each repetition, the same at all depths.
    drawn = [document.fields["needle"] for document in subjects[0].documents]
    assert [len(set(drawn[n : n + 11])) for n in range(0, 110, 11)] == [1] * 10
    expected = []
    for repeat in range(10):
        random.seed(repeat)
        expected.append(random.choice(NEEDLES[:3])["needle"])
    assert drawn[::11] == expected


def test_room_is_made_for_the_answers_that_are_asked_for(folder: Path) -> None:
    args = evaluation_arguments(["--task", NAME, "--task-data-path", str(folder), "--max-new-tokens", "300"])
    (loaded,) = load_tasks(args, choose_all(args))
    made = fitted(loaded, encode, 640)
    # 640 positions less 236 more than the usual 64: the two longest prompts would leave no room.
    assert [subject.name for subject in made.subjects] == [
        f"{code} {n}" for code in ("en", "zh") for n in (160, 320, 404)
    ]
    sizes = {subject.name: set() for subject in made.subjects}
    for item in made.items:
        assert item.question.max_new_tokens == 300
        sizes[item.subject.name].add(len(encode(item.question.prompt)))
    assert all(max(found) + 300 <= 640 for found in sizes.values())
    assert min(sizes["en 404"]) + 300 >= 640 - 3
    # Prompts that have room are no shorter for it.
    assert {document.fields["text"] for document in made.subjects[0].documents} == {
        document.fields["text"] for document in fit(load(folder), encode, 640, 64)[0].documents
    }


def test_lengths_that_texts_do_not_fill_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A score is never that of a shorter text than its name says."""
    subjects = fit(load(folder), encode, 1200, 64)  # six texts of 150 tokens each
    assert [subject.name for subject in subjects] == [f"{code} {n}" for code in ("en", "zh") for n in (300, 600, 900)]
    for file in ("PaulGrahamEssays", "zh_finance"):
        assert f"the 900 tokens of {file}.jsonl do not fill prompts of 1200, which are left out" in caplog.text
    with pytest.raises(UserError, match=r"PaulGrahamEssays.jsonl has 900 tokens .* the shortest prompt, one of 1000"):
        fit(load(folder), encode, 4096, 64)


def test_a_needle_stands_between_words() -> None:
    assert hide("N", "ab cd ef", 0) == "\nN\nab cd ef"
    assert hide("N", "ab cd ef", 50) == "ab\nN\n cd ef"
    assert hide("N", "ab cd ef", 100) == "ab cd ef\nN\n"
    assert hide("N", "甲乙丙丁", 50) == "甲乙\nN\n丙丁"


def test_an_oracle_is_right_and_a_constant_is_wrong(folder: Path) -> None:
    subjects = fit(load(folder), encode, 512, 64)
    assert_oracle_is_right(BENCHMARK, subjects)
    assert constant_result(BENCHMARK, subjects).total["keyword"].accuracy == 0.0


def test_mistakes(folder: Path) -> None:
    with pytest.raises(UserError, match=r"hold no text beside the question of .*needles.jsonl, line 2"):
        fit(load(folder), encode, 100, 64)
    file = folder / "needles.jsonl"
    file.write_text(json.dumps({**NEEDLES[0], "arg2": ""}) + "\n")
    with pytest.raises(UserError, match=r"needles.jsonl, line 1: field 'arg2' is '', expected a text"):
        load(folder)
    file.write_text(json.dumps(NEEDLES[0]) + "\n")
    with pytest.raises(UserError, match=r"needles.jsonl holds no needle whose field 'language' is 'Chinese'"):
        load(folder)
    (folder / "zh_finance.jsonl").unlink()
    with pytest.raises(UserError, match=r"zh_finance.jsonl does not exist. Give the folder of NeedleBench"):
        load(folder)
