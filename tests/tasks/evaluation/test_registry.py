"""The names that users give, frozen."""

from __future__ import annotations

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.registry import BENCHMARKS, find


def test_names() -> None:
    plain = ["agieval", "bbh", "boolq", "ceval", "cmmlu", "gsm8k", "hellaswag", "human_eval", "mmlu", "mmlu_ppl"]
    plain.append("needlebench")
    assert list(BENCHMARKS) == plain
    assert [name for name, benchmark in BENCHMARKS.items() if benchmark.executes_code] == ["human_eval"]
    assert all(find(name).name == name for name in BENCHMARKS)


def test_a_strange_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no benchmark 'gsm8', expected one of .*Did you mean gsm8k\?"):
        find("gsm8")
