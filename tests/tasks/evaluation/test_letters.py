"""The letter of a written answer, by a table made by hand."""

from __future__ import annotations

import pytest

from mindspeed_llm.tasks.evaluation.filters import INVALID
from mindspeed_llm.tasks.evaluation.letters import announced_letters


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (" B", "B"),
        ("b.", "B"),
        ("(B)", "B"),
        ("B. Paris", "B"),
        ("B) Paris\nC) Rome", "B"),
        ("The answer is (C).", "C"),
        ("**Answer: D**", "D"),
        ("The correct option is C", "C"),
        ("First I thought the answer is A. No: the answer is option B", "B"),
        (r"So it is \boxed{C}.", "C"),
        (r"\boxed{\text{(B)}}", "B"),
        ("答案是B", "B"),
        ("答案：C。", "C"),
        ("因此故选D", "D"),
        ("I think (B) fits.", "B"),
        ("(A) fits best", "A"),
        # Articles, several options, and none.
        ("A dog is in the house", INVALID),
        ("the answer is a dog", INVALID),
        ("It could be A or B", INVALID),
        ("Both (B) and (C)", INVALID),
        ("The answer is not clear", INVALID),
        ("E", INVALID),
        # Blanks without end: thousands of them have to be read in no time.
        ("答案" + "\n" * 20_000 + "无", INVALID),
        ("The answer is " + " (" * 5_000 + "option" + " " * 20_000 + "B", "B"),
        ("", INVALID),
    ],
)
def test_one_letter(text: str, letter: str) -> None:
    assert announced_letters("ABCD")(text) == letter


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("AD", "AD"),
        ("D, A", "AD"),
        ("答案：A、C", "AC"),
        ("The answer is B,D.", "BD"),
        ("B", "B"),
        ("A  \t D", INVALID),
    ],
)
def test_several_letters(text: str, letters: str) -> None:
    assert announced_letters("ABCDEFG", several=True)(text) == letters
