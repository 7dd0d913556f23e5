"""Loading the tokenizer of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config import ModelConfig
from mindspeed_llm.fsdp2.models.tokenizer import check_vocabulary, load_tokenizer
from tests.support.tokenizers import byte_tokenizer
from tests.support.toys import build_toy

SIZE = 256 + 2  # bytes, <s>, </s>


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with the byte tokenizer, which has no pad token."""
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, **fields: Any):
    return load_tokenizer(ModelConfig(model_name_or_path=str(folder), **fields))


def test_it_comes_from_the_model_and_pads_with_its_end_of_text(folder: Path) -> None:
    tokenizer = load(folder)
    assert len(tokenizer) == SIZE
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("</s>", "</s>")
    assert tokenizer.decode(tokenizer("héllo").input_ids) == "héllo"


def test_a_pad_token_of_its_own_is_kept(tmp_path: Path) -> None:
    byte_tokenizer(pad_token="<pad>").save_pretrained(tmp_path)
    assert load(tmp_path).pad_token == "<pad>"


def test_another_folder_may_hold_it(tmp_path: Path, folder: Path) -> None:
    tokenizer = load(tmp_path / "no_such_model", tokenizer_name_or_path=str(folder))
    assert len(tokenizer) == SIZE


def test_added_tokens(folder: Path) -> None:
    tokenizer = load(folder, add_tokens="<tool>, <call>,", add_special_tokens="<user>,<bot>")
    assert len(tokenizer) == SIZE + 4
    ids = tokenizer("a<tool><call><user><bot>").input_ids
    assert ids[1:] == [SIZE, SIZE + 1, SIZE + 2, SIZE + 3]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool><call>"
    assert tokenizer.eos_token == "</s>"


def test_special_tokens_that_are_there_already_stay_special(tmp_path: Path) -> None:
    byte_tokenizer(["<|im_end|>"]).save_pretrained(tmp_path)
    tokenizer = load(tmp_path, add_special_tokens="<user>")
    ids = tokenizer("a<|im_end|><user>").input_ids
    assert len(ids) == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


def test_special_tokens_in_the_text_can_be_split(folder: Path) -> None:
    assert load(folder)("</s>").input_ids == [257]
    assert len(load(folder, split_special_tokens=True)("</s>").input_ids) == 4


@pytest.mark.parametrize("field", ["model_name_or_path", "tokenizer_name_or_path"])
@pytest.mark.parametrize("content", ["nothing", "no folder", "broken"])
def test_no_readable_tokenizer(tmp_path: Path, field: str, content: str) -> None:
    place = tmp_path / "m"
    if content != "no folder":
        place.mkdir()
    if content == "broken":
        (place / "tokenizer.json").write_text("{")
        (place / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    fields = {"model_name_or_path": str(tmp_path), field: str(place)}
    with pytest.raises(UserError) as error:
        load_tokenizer(ModelConfig(**fields))
    assert f"model.{field}: no tokenizer could be read from {place}" in str(error.value)
    assert "expected tokenizer.json" in str(error.value)


def test_a_tokenizer_without_end_of_text(tmp_path: Path) -> None:
    byte_tokenizer(eos_token=None).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.model_name_or_path: .* has no eos_token"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"model\.tokenizer_name_or_path: .* has no eos_token"):
        load(tmp_path / "other", tokenizer_name_or_path=str(tmp_path))


def test_more_tokens_than_embedding_rows(folder: Path) -> None:
    check_vocabulary(load(folder), build_toy("llama", vocab_size=SIZE))
    with pytest.raises(UserError, match=r"the tokenizer has 259 tokens, but the model has 258 embedding rows"):
        check_vocabulary(load(folder, add_tokens="<tool>"), build_toy("llama", vocab_size=SIZE))
