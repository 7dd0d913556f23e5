"""What --eval-samples needs, and its prompts in running text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.greedy import NO_TOKEN
from mindspeed_llm.tasks.inference.prompts import first_prompts
from mindspeed_llm.training.data.datasets import build_datasets
from mindspeed_llm.training.next_tokens import best_of_shard
from tests.training.arguments.lines import arguments
from tests.training.data import helpers

TOKENIZER = "--tokenizer-name-or-path somewhere"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{TOKENIZER} --metrics-dir m --eval-iters 0", "asks the model at every evaluation, but there are none"),
        ("--metrics-dir m", "writes texts, which needs a tokenizer"),
        (TOKENIZER, "writes samples.jsonl beside the metrics"),
    ],
)
def test_what_is_missing(flags: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        arguments(f"--eval-samples 3 {flags}")
    assert str(error.value).startswith(f"--eval-samples 3 {message}")


def test_a_length_without_answers_is_reported() -> None:
    assert arguments(f"--eval-samples 3 {TOKENIZER} --metrics-dir m --eval-samples-max-new-tokens 5").notices == ()
    [notice] = arguments("--eval-samples-max-new-tokens 5").notices
    assert notice.startswith("--eval-samples-max-new-tokens has no effect without --eval-samples")


def test_documents_are_asked_their_first_half(tmp_path: Path) -> None:
    """Of the validation data alone, each once, cut to the length of a sequence, without the token that ends them."""
    lengths = [40] * 6 + [9, 1, 30, 12]
    reader = helpers.documents(tmp_path / "data", lengths, seed=3)
    tokenizer = helpers.save_tokenizer(tmp_path / "tokenizer")
    words = ("--data-path", tmp_path / "data", "--split", "6,4,0", "--data-cache-path", tmp_path / "cache")
    args = helpers.arguments(*words, "--tokenizer-name-or-path", tokenizer, tokenizer_type="PretrainedFromHF")
    found = first_prompts(build_datasets(args).valid_texts, 9, max_length=16, stop_ids={helpers.EOD})
    # Documents 6, 8 and 9: the one between them is an end alone.
    texts = [reader[6][:8].tolist(), reader[8][:16].tolist(), reader[9][:11].tolist()]
    assert [item.ids + item.reference for item in found] == texts
    assert [len(item.ids) for item in found] == [4, 8, 5]


def test_what_fills_up_the_vocabulary_is_no_token() -> None:
    logits = torch.tensor([[-3.0, -1.0, -2.0, 0.0], [-1.0, -3.0, -2.0, 0.0]])
    for first, vocab_size, tokens in ((0, 3, [1, 0]), (4, 7, [5, 4]), (4, 8, [7, 7])):
        values, found = best_of_shard(logits, first, vocab_size)
        assert found.tolist() == tokens
        assert values.tolist() == [logits[row, token - first] for row, token in enumerate(tokens)]
    values, _ = best_of_shard(logits, 8, 7)
    assert values.tolist() == [-torch.inf, -torch.inf]
    assert logits[0, 3] == 0.0, "the logits themselves stay"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_have_no_next_token(value: float) -> None:
    """Training may go on with them; the other rows have theirs."""
    logits = torch.tensor([[0.0, value, 2.0], [0.0, 1.0, 2.0]])
    assert best_of_shard(logits, 3, 6)[1].tolist() == [NO_TOKEN, 5]
