"""What is said about tokenizers that do not go with their model, or put tokens behind prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mindspeed_llm.tasks.inference.main import main
from mindspeed_llm.tasks.inference.tokenizer import doubts
from mindspeed_llm.tasks.preprocess.tokenizers import TokenizerOptions, load_tokenizer
from tests.support.tokenizers import byte_tokenizer
from tests.support.toys import build_toy

TOKENS = 258
"""Of the tokenizer."""


def around(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    """The tokenizer with special tokens around each text."""
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=ids)
    return tokenizer


def said(folder: Path, vocab_size: int = TOKENS, *, named: bool = True) -> list[str]:
    tokenizer = load_tokenizer(TokenizerOptions(name_or_path=str(folder)))
    return list(doubts(tokenizer, vocab_size, folder if named else None))


def test_tokens_behind_every_text(tmp_path: Path) -> None:
    for template, ends in (("$A", False), ("<s> $A", False), ("<s> $A </s>", True), ("$A </s>", True)):
        around(byte_tokenizer(), template).save_pretrained(tmp_path)
        found = said(tmp_path)
        assert (AutoTokenizer.from_pretrained(tmp_path)("x").input_ids[-1] == 257) == ends == bool(found)
    assert f"(post_processor in {tmp_path / 'tokenizer.json'})" in found[0] and "(</s>) behind every text" in found[0]
    assert "(as its files say)" in said(tmp_path, named=False)[0]
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {"add_eos_token": True}))
    assert f"(add_eos_token true in {file})" in said(tmp_path)[0]


@pytest.mark.parametrize(("vocab_size", "warns"), [(TOKENS, False), (2 * TOKENS, False), (2 * TOKENS + 1, True)])
def test_a_tokenizer_of_another_model(vocab_size: int, warns: bool, tmp_path: Path) -> None:
    """Vocabularies are padded, by less than their own size."""
    byte_tokenizer().save_pretrained(tmp_path)
    found = said(tmp_path, vocab_size)
    assert len(found) == warns
    assert not warns or f"the tokenizer has 258 tokens, the model {vocab_size}: less than half" in found[0]


@pytest.mark.usefixtures("logging_as_before")
def test_loading_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_toy("llama", num_hidden_layers=1, vocab_size=520).save_pretrained(tmp_path)
    around(byte_tokenizer(), "$A </s>").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 520]}))
    assert main(["--load", str(tmp_path), "--task", "greedy", "--prompt", "a", "--max-new-tokens", "1"]) == 0
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert len(warned) == 3
    assert f"post_processor in {tmp_path / 'tokenizer.json'}" in warned[0] and "the model 520" in warned[1]
    assert "generation_config.json: eos_token_id 520, but the model has 520 tokens: no answer ends there" in warned[2]
