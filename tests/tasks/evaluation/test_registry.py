"""The names that users give, frozen."""

from __future__ import annotations

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.registry import BENCHMARKS, find


def test_names() -> None:
    assert list(BENCHMARKS) == ["agieval", "bbh", "boolq", "ceval", "cmmlu", "gsm8k", "hellaswag", "mmlu", "mmlu_ppl"]
    assert all(find(name).name == name for name in BENCHMARKS)


def test_a_strange_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no benchmark 'gsm8', expected one of .*Did you mean gsm8k\?"):
        find("gsm8")
