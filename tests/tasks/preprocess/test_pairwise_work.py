"""Pairs whose prompts differ: an empty thought stands in the prompt of the reply that has none."""

import pytest

from mindspeed_llm.tasks.preprocess import pairwise_work
from mindspeed_llm.tasks.preprocess.render import Turn
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
    None: ([R(RECORD["chosen"] + "<|im_end|>\n")], [EMPTY, R("7<|im_end|>\n")]),
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
def test_each_side_has_the_prompt_of_its_own_reply(enable_thinking):
    _check(enable_thinking)


def test_the_prompt_of_the_chosen_reply_on_both_sides_is_found(monkeypatch):
    original = pairwise_work.build_pair

    def shared(chosen, rejected, *rest):
        mixed = [Turn(a.source, b.target, b.train) for a, b in zip(chosen, rejected, strict=True)]
        return original(chosen, mixed, *rest)

    monkeypatch.setattr(pairwise_work, "build_pair", shared)
    with pytest.raises(AssertionError):
        _check(None)
