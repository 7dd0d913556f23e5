"""Marks of templates that a tokenizer would split are found, and plain text is not taken for a mark."""

import pytest

from mindspeed_llm.tasks.preprocess.handlers import WorkOptions, find_handler, make_work
from mindspeed_llm.tasks.preprocess.once import warn_once
from mindspeed_llm.tasks.preprocess.template_marks import split_marks
from mindspeed_llm.tasks.preprocess.templates import load_template
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from tests.support.tokenizers import byte_tokenizer

# The marks in a conversation without tools, by hand.
MARKS = {
    "gemma": ["<start_of_turn>", "<end_of_turn>"],
    "gemma_legacy": ["<start_of_turn>", "<end_of_turn>"],
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "baichuan2": ["<reserved_106>", "<reserved_107>"],
    "deepseek3": ["<｜User｜>", "<｜Assistant｜>"],
    "gpt_oss": ["<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|return|>"],
}
PLAIN = ["default", "empty", "alpaca", "cpm", "llama2", "mistral", "mixtral", "deepseek2", "chatglm2_legacy"]


@pytest.mark.parametrize("name", MARKS)
def test_marks_that_are_split(name):
    template = load_template(name)
    assert sorted(split_marks(template, as_tokenizer(byte_tokenizer()))) == sorted(MARKS[name])
    assert split_marks(template, as_tokenizer(byte_tokenizer(MARKS[name]))) == []
    assert split_marks(template, as_tokenizer(byte_tokenizer(MARKS[name][1:]))) == MARKS[name][:1]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_text_is_no_mark(name):
    assert split_marks(load_template(name), as_tokenizer(byte_tokenizer())) == []


def test_one_line_names_the_marks(caplog):
    warn_once.cache_clear()
    handler = find_handler("AlpacaStyleInstructionHandler")
    for _ in range(2):
        make_work(handler, byte_tokenizer(), WorkOptions(prompt_type="gemma"))
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("template 'gemma': the tokenizer has no token for <start_of_turn>, <end_of_turn>, and")
    caplog.clear()
    make_work(handler, byte_tokenizer(MARKS["gemma"]), WorkOptions(prompt_type="gemma"))
    assert not caplog.records
