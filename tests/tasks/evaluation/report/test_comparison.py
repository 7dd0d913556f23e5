"""Differences between two evaluations, against figures worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.report.comparison import compare, difference_test, read_samples, sign_test
from tests.tasks.evaluation.report.results import made_up


@pytest.mark.parametrize(
    ("better", "worse", "probability"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (3, 3, 1.0),
        (5, 1, 2 * (1 + 6) / 64),
        (1, 5, 2 * (1 + 6) / 64),
        (10, 2, 2 * (1 + 12 + 66) / 4096),
        (8, 0, 2 / 256),
    ],
)
def test_an_uneven_split(better: int, worse: int, probability: float) -> None:
    assert sign_test(better, worse) == pytest.approx(probability, rel=1e-12)


def test_many_changes() -> None:
    """More than a float can count: the tail of the normal distribution is near (with half a step of correction)."""
    expected = math.erfc((1100 - 1000 - 0.5) / math.sqrt(500) / math.sqrt(2))
    assert sign_test(1100, 900) == pytest.approx(expected, rel=0.03)


def test_independent_scores() -> None:
    one, other = {"accuracy": 0.5, "stderr": 0.03}, {"accuracy": 0.598, "stderr": 0.04}
    # 0.098 / 0.05 = 1.96 standard errors: the quantile of 5 %.
    assert difference_test(one, other) == pytest.approx(0.05, abs=1e-4)
    assert difference_test(one, {"accuracy": 0.6, "stderr": None}) is None
    assert difference_test({"accuracy": 1.0, "stderr": 0.0}, {"accuracy": 1.0, "stderr": 0.0}) == 1.0


def test_samples_are_paired() -> None:
    (now, rows), (then, old_rows) = made_up(1, skill=0.9), made_up(2, skill=0.3)
    found, verdicts = compare(now, rows, then, iter(old_rows))
    assert [one.task for one in found] == ["mmlu", "gsm8k"]
    old = [row["correct"]["flexible"] for row in old_rows if row["task"] == "gsm8k"]
    new = [row["correct"]["flexible"] for row in rows if row["task"] == "gsm8k"]
    better = sum(b and not a for a, b in zip(old, new, strict=True))
    worse = sum(a and not b for a, b in zip(old, new, strict=True))
    assert (found[1].better, found[1].worse) == (better, worse)
    assert found[1].p_value == sign_test(better, worse) < 0.05
    assert found[1].later - found[1].earlier == pytest.approx((better - worse) / 30)
    assert verdicts["gsm8k", "gsm8k", 4] == old[4]
    assert found[0].notes == ()


def test_other_samples_are_not_paired() -> None:
    (now, rows), (then, old_rows) = made_up(1), made_up(2, size=8)
    then["tasks"]["mmlu"]["data_hash"] = "other"
    del then["results"]["gsm8k"]
    for earlier_rows in (old_rows, None):
        (found,), _ = compare(now, rows, then, earlier_rows)
        assert found.better is None
        assert found.p_value == difference_test(then["results"]["mmlu"], now["results"]["mmlu"])
        assert found.notes == ("other data",)


def test_the_same_question_asked_otherwise_is_no_pair() -> None:
    now, rows = made_up(1)
    old_rows = [row | {"prompt": f"{row['prompt']} "} if row["task"] == "gsm8k" else row for row in rows]
    (mmlu, gsm8k), verdicts = compare(now, rows, now, old_rows)
    assert mmlu.better == 0 and gsm8k.better is None
    assert {task for task, _, _ in verdicts} == {"mmlu"}


def test_damaged_samples(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    _, rows = made_up(1)
    lines = [json.dumps(row) for row in rows[:2]]
    file.write_text("\n".join(lines))
    assert len(list(read_samples(file))) == 2
    for text, said in (("\n".join([*lines, "{}"]), "line 3 is no sample"), (lines[0][:-5], "cannot be read")):
        file.write_text(text)
        with pytest.raises(UserError, match=said):
            list(read_samples(file))
