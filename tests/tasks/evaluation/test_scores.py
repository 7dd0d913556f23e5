"""Standard errors against the definition of variance, and reading of answers."""

from __future__ import annotations

import math
import statistics

import pytest

from mindspeed_llm.tasks.evaluation.filters import FIRST_LINE, INVALID, exact_match, regex
from mindspeed_llm.tasks.evaluation.scores import Score, pooled_stderr, score, total_score

VERDICTS = [[True, False, False, True, True], [False, True], [True, True, True]]


@pytest.mark.parametrize("verdicts", VERDICTS)
def test_standard_error_of_a_subject(verdicts: list[bool]) -> None:
    found = score(verdicts)
    values = [float(verdict) for verdict in verdicts]
    assert found.accuracy == pytest.approx(statistics.mean(values))
    assert found.stderr == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)))


def test_standard_error_over_subjects_is_from_the_pooled_variance() -> None:
    found = total_score([score(verdicts) for verdicts in VERDICTS])
    squares = sum((value - statistics.mean(part)) ** 2 for part in VERDICTS for value in map(float, part))
    assert (found.correct, found.total) == (7, 10)
    assert found.stderr == pytest.approx(math.sqrt(squares / (10 - 3) / 10))


def test_one_subject_in_all_is_that_subject() -> None:
    part = score(VERDICTS[0])
    assert total_score([part]).stderr == pytest.approx(part.stderr)


def test_one_sample_has_no_standard_error() -> None:
    single = score([True])
    assert single == Score(correct=1, total=1, stderr=None)
    assert pooled_stderr([single, single]) is None
    both = total_score([single, score([True, False])])
    assert both.stderr == pytest.approx(math.sqrt(0.5 / (3 - 2) / 3))


def test_regex_takes_the_group_that_matched() -> None:
    assert regex(r"(\d+)|([a-z]+)", take=-1)("12 ab") == "ab"
    assert regex("b")("aaa") == INVALID


@pytest.mark.parametrize(("text", "line"), [(" A \nB", "A"), ("A", "A"), ("", ""), ("\nA", "")])
def test_first_line(text: str, line: str) -> None:
    assert FIRST_LINE(text) == line


def test_exact_match_takes_out_of_both_sides() -> None:
    assert exact_match(remove=(",",), ignore_case=True, ignore_punctuation=True)("(A)", ",a.")
    assert not exact_match()("A", "a")
