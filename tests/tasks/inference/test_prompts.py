"""Prompts out of samples, and what ends an answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.greedy import NO_TOKEN, greedy_answers, padded
from mindspeed_llm.tasks.inference.prompts import Prompt, Text, cut_at, first_prompts, prompt_of
from mindspeed_llm.tasks.inference.stopping import as_ids, ends_of, of_generation_config, stop_ids
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from tests.support.tokenizers import chatml_tokenizer


def text(ids: list[int], targets: str) -> Text:
    """`targets` has an x where there is one."""
    return np.array(ids), np.array([token if mark == "x" else -100 for token, mark in zip(ids, targets, strict=True)])


@pytest.mark.parametrize(
    ("ids", "targets", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7], "---xx--", ([1, 2, 3], [4, 5])),
        ([1, 2, 3, 4, 5, 6, 7], "--x--xx", ([1, 2], [3])),
        # An end within a reply (of a step, say) is part of it; what replies end with is found later.
        ([1, 2, 3, 9, 5], "--xxx", ([1, 2], [3, 9, 5])),
        ([1, 2, 3, 4, 5], "xxxxx", ([1, 2], [3, 4, 5])),
        ([1, 2, 3, 4, 5], "-xxxx", ([1, 2], [3, 4, 5])),
        # A text, and the one behind it.
        ([1, 2, 3, 4, 9, 6, 7], "xxxxxxx", ([1, 2], [3, 4])),
        ([1, 2, 3], "---", None),
        ([1], "x", None),
        ([9, 2, 3], "xxx", None),
    ],
)
def test_a_prompt_ends_before_the_first_target(
    ids: list[int], targets: str, expected: tuple[list[int], list[int]] | None
) -> None:
    found = prompt_of(text(ids, targets), {9})
    assert found == (None if expected is None else Prompt(ids=expected[0], reference=expected[1]))


def test_the_first_prompts_that_leave_room() -> None:
    texts = [text([1, 2, 3], "---"), text([1, 2, 3, 4], "---x"), text([5, 6, 7], "--x"), text([8, 8, 8], "--x")]
    assert [item.ids for item in first_prompts(texts, 1, max_length=4, stop_ids=())] == [[1, 2, 3]]
    assert [item.ids for item in first_prompts(texts, 9, max_length=3, stop_ids=())] == [[5, 6], [8, 8]]
    assert cut_at([Prompt(ids=[1], reference=[2, 9, 3])], {9, 3}) == [Prompt(ids=[1], reference=[2])]


def test_what_ends_answers(tmp_path: Path) -> None:
    tokenizer = as_tokenizer(chatml_tokenizer())
    vocabulary = tokenizer.get_vocab()
    end, mark = vocabulary["</s>"], vocabulary["<|im_end|>"]
    assert stop_ids(tokenizer, ["<|im_end|>", "no such word"], [5]) == {end, mark, 5}
    told = [tokenizer.encode(f"{word}<|im_end|>\n") for word in ("yes", "no")]
    assert ends_of(told, tokenizer) == {mark}
    assert ends_of([tokenizer.encode("<|im_end|> cut"), []], tokenizer) == frozenset()
    file = tmp_path / "generation_config.json"
    assert of_generation_config(tmp_path) == of_generation_config(None) == []
    for value, expected in ((7, [7]), ([7, 8], [7, 8]), (None, [])):
        file.write_text(json.dumps({"eos_token_id": value}))
        assert of_generation_config(tmp_path) == as_ids(value) == expected
    file.write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json cannot be read"):
        of_generation_config(tmp_path)


def test_answers_end_where_they_must() -> None:
    """The model counts on; rows that have ended are not asked any more."""
    asked: list[list[int]] = []

    def counting(rows: list[list[int]]) -> list[int]:
        asked.append([len(row) for row in rows])
        return [row[-1] + 1 for row in rows]

    found = greedy_answers([[1], [6, 7], [3, 4, 5]], counting, max_new_tokens=3, max_length=5, stop_ids={9, 4})  # type: ignore[arg-type]
    assert [(answer.ids, answer.finish_reason) for answer in found] == [
        ([2, 3], "stop"),
        ([8], "stop"),
        ([6, 7], "length"),
    ]
    assert asked == [[1, 2, 3], [2, 3, 4], [3]]
    lost = iter([[5, NO_TOKEN], [6]])
    found = greedy_answers([[1], [2]], lambda rows: next(lost), max_new_tokens=2, max_length=5, stop_ids={9})
    assert [(answer.ids, answer.finish_reason) for answer in found] == [([5, 6], "length"), ([], "nan")]
    assert padded([[1, 2], [3]], 3).tolist() == [[1, 2, 0], [3, 0, 0]]
