"""Reading and comparing expressions: by hand, and against lm-eval's rules where it is installed."""

from __future__ import annotations

import pytest

from mindspeed_llm.tasks.evaluation.filters import INVALID
from mindspeed_llm.tasks.evaluation.math_answers import (
    final_expression,
    final_expression_of_lm_eval,
    same_expression,
    same_expression_of_lm_eval,
)
from tests.tasks.evaluation import lm_eval_files

ANSWERS = [
    " 2", "2.", "$2$", "It is $x = 2$.", "x=2", r"\boxed{2}", r"so \boxed{x = 2}.", r"\boxed{\frac{1}{2}}", "$1/2$",
    "$0.5$", r"$\frac12$", r"$\dfrac{1}{2}$", r"$\tfrac1{2}$", r"$\sqrt3$", r"$\sqrt{3}$", r"$\left( 1, 2 \right)$",
    "$(1,2)$", r"$90^\circ$", "$90$", r"$90^{\circ}$", r"$50\%$", "$50$", "50", r"$3 \text{ cm}$", "$3$", "3",
    "$.5$", r"$-\frac{3}{4}$", "$-3/4$", "$5$;$10$", "$5$; $10$", "10", r"\boxed{2", "", "none",
    "the 3rd of 7", r"$a\!b$", "$ab$", "$k=7$", "$abc=7$", "7",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        (r" so it is \boxed{\frac{1}{2}} and 3", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{x = 4}", "4"),
        (r"\boxed{1", INVALID),
        ("It is $x = 3$ and 4", "3"),
        ("x + 1 = 12.", "12"),
        ("That makes 3.5 of 7", "7"),
        (" I do not know ", "I do not know"),
        # A line without words is the answer, its sign included.
        (" -3", "-3"),
        (r" \frac{1}{2}.", r"\frac{1}{2}"),
        (" (1, 2)\nThat is all.", "(1, 2)"),
        (r" 3\sqrt{2}", r"3\sqrt{2}"),
        ("It is -7 degrees", "-7"),
        ("That leaves 16-3 eggs", "3"),
    ],
)
def test_the_expression_of_an_answer(text: str, expression: str) -> None:
    assert final_expression(text) == expression


@pytest.mark.parametrize(
    ("answer", "target", "is_same"),
    [
        (r"\dfrac12", r"$\frac{1}{2}$", True),
        ("0.5", r"$\frac{1}{2}$", True),
        ("3/4", r"$\frac34$", True),
        (r"\left( 1 , 2 \right)", "$(1,2)$", True),
        (r"90^\circ", "$90$", True),
        (r"\sqrt2", r"$\sqrt{2}$", True),
        ("0.25", r"$\frac{1}{4}$", False),
        ("Ann", "Ann", True),
        ("Ben", "Ann", False),
        ("", "Ann", False),
        # Targets without a mark are the expression itself, as the files of AGIEval have them.
        (r"\frac{1}{2}", r"\frac{1}{2}", True),
        ("2", r"\frac{1}{2}", False),
        ("-3", "-3", True),
        ("3", "-3", False),
        ("(1,2)", "(1, 2)", True),
    ],
)
def test_one_spelling(answer: str, target: str, is_same: bool) -> None:
    assert same_expression(answer, target) is is_same


def test_verdicts_are_those_of_lm_eval() -> None:
    """All pairs of the answers above, those in which it reads nothing among them: it calls two such texts the same."""
    theirs = lm_eval_files.function("agieval/utils.py", "is_equiv")
    pairs = [(answer, target) for answer in ANSWERS for target in ANSWERS]
    differ = [
        (answer, target)
        for answer, target in pairs
        if same_expression_of_lm_eval(final_expression_of_lm_eval(answer), target) is not theirs(answer, target)
    ]
    assert not differ
    assert theirs("none", "")
    assert sum(theirs(answer, target) for answer, target in pairs) > len(ANSWERS)


def test_readings_are_those_of_lm_eval() -> None:
    theirs = lm_eval_files.function("agieval/utils.py", "parse_math_answer")
    for answer in ANSWERS:
        read = theirs(answer)
        assert final_expression_of_lm_eval(answer) == (INVALID if read is None else read)
