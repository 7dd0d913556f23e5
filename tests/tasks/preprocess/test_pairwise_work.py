"""Pairs of which one reply has a thought: both have one prompt, and the other reply an empty thought where it is due.

Pairs that are too long lose their earliest turns on both sides.
"""

from dataclasses import asdict
from pathlib import Path

import pytest

from mindspeed_llm.tasks.preprocess import render
from mindspeed_llm.tasks.preprocess.chunks import Summary
from mindspeed_llm.tasks.preprocess.command.report import result_lines
from tests.tasks.preprocess.pieces import R, bpe_tokenizer, run, sequences, spelled

RECORD = {
    "instruction": "And +1?",
    "chosen": "<think>\n5+1\n</think>\n\n6",
    "rejected": "7",
    "history": [["2+3?", "<think>\n2+3\n</think>\n\n5"]],
}
PROMPT = [
    "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n", "5<|im_end|>\n",
    "<|im_start|>user\nAnd +1?<|im_end|>\n<|im_start|>assistant\n",
]  # fmt: skip
EMPTY = "<think>\n\n</think>\n\n"
SIDES = {
    None: ([R(RECORD["chosen"] + "<|im_end|>\n")], [R(EMPTY), R("7<|im_end|>\n")]),
    True: ([R(RECORD["chosen"] + "<|im_end|>\n")], [R(EMPTY), R("7<|im_end|>\n")]),
    False: ([EMPTY, R("6<|im_end|>\n")], [EMPTY, R("7<|im_end|>\n")]),
}


def _check(enable_thinking):
    tokenizer = bpe_tokenizer()
    chunk = run("AlpacaStylePairwiseHandler", tokenizer, RECORD, prompt_type="qwen3", enable_thinking=enable_thinking)
    for side, pieces in zip(("chosen", "rejected"), SIDES[enable_thinking], strict=True):
        ids, labels = spelled(tokenizer, [*PROMPT, *pieces])
        assert sequences(chunk, f"{side}_input_ids") == [ids]
        assert sequences(chunk, f"{side}_labels") == [labels]


@pytest.mark.parametrize("enable_thinking", SIDES)
def test_both_sides_have_one_prompt(enable_thinking):
    _check(enable_thinking)


def test_an_empty_thought_in_one_prompt_only_is_found(monkeypatch):
    monkeypatch.setattr(render, "_sources", lambda turns: [])
    with pytest.raises(AssertionError):
        _check(None)


LONG_PAIR = {
    "instruction": "And now?",
    "chosen": "yes " * 20,
    "rejected": "no",
    "history": [["first " * 10, "a"], ["second " * 10, "b"]],
    "system": "Be brief.",
}


def _llama3(turns, reply):
    def block(role, text):
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}"

    pieces = ["<s>", block("system", "Be brief.") + "<|eot_id|>"]
    for question, answer in turns:
        pieces += [block("user", question) + "<|eot_id|>" + block("assistant", ""), answer, "<|eot_id|>"]
    pieces.append(block("user", "And now?") + "<|eot_id|>" + block("assistant", ""))
    return [*pieces, R(reply), R("<|eot_id|>")]


@pytest.mark.parametrize("missing", [-1, 0, 1])
@pytest.mark.parametrize("num_left_out", [0, 1, 2])
def test_long_pairs_lose_the_same_turns_on_both_sides(num_left_out, missing):
    """Also where the rejected side alone would have fitted."""
    tokenizer = bpe_tokenizer()
    turns = LONG_PAIR["history"][num_left_out:]
    length = len(spelled(tokenizer, _llama3(turns, LONG_PAIR["chosen"]))[0]) - missing
    if missing == 1 and num_left_out < 2:
        turns = LONG_PAIR["history"][num_left_out + 1 :]
    chunk = run("AlpacaStylePairwiseHandler", tokenizer, LONG_PAIR, prompt_type="llama3", seq_length=length)
    for side in ("chosen", "rejected"):
        ids, labels = spelled(tokenizer, _llama3(turns, LONG_PAIR[side]))
        assert sequences(chunk, f"{side}_input_ids") == [ids[:length]]
        assert sequences(chunk, f"{side}_labels") == [labels[:length]]


def test_pairs_without_a_difference_are_kept_and_counted():
    """By their tokens: replies that differ may be the same once they are rendered."""
    equal = {"instruction": "Q", "chosen": "same", "rejected": "same"}
    listed = {"instruction": "Q", "chosen": ["a"], "rejected": ["b"]}
    thought = {"instruction": "Q", "chosen": "<think>\nx\n</think>\n\n7", "rejected": "7"}
    chunk = run(
        "AlpacaStylePairwiseHandler",
        bpe_tokenizer(),
        equal,
        listed,
        thought,
        prompt_type="qwen3",
        enable_thinking=False,
    )
    assert chunk.equal_pairs == 2 and len(chunk.lengths["chosen_labels"]) == 3 and not chunk.skipped
    summary = Summary()
    summary.add(chunk)
    summary.add_summary(summary)
    assert summary.equal_pairs == 4
    assert summary.notes() == ["4 pairs have the same chosen and rejected reply"]
    lines = result_lines(asdict(summary), {}, Path())
    assert any("4 have equal replies (kept)" in line for line in lines)
