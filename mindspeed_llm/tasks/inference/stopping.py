"""Which tokens end an answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.files import read_json_object
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer

_FILE = "generation_config.json"


def stop_ids(tokenizer: Tokenizer, words: Iterable[str] = (), others: Iterable[int] = ()) -> frozenset[int]:
    """The tokenizer's end of text, those of `words` that are one token, and `others`."""
    found = set(others)
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    vocabulary = tokenizer.get_vocab()
    found.update(vocabulary[word] for word in words if word in vocabulary)
    return frozenset(found)


def ends_of(references: Iterable[Sequence[int]], tokenizer: Tokenizer) -> frozenset[int]:
    """The special tokens that replies of the data end with, whatever template has put them there. White space may stand
    behind them.
    """
    found = set()
    for reference in references:
        tail = [token for token in reference[-2:] if tokenizer.decode([token]).strip()]
        if tail and not tokenizer.decode(tail[-1:], skip_special_tokens=True):
            found.add(tail[-1])
    return frozenset(found)


def of_generation_config(folder: Path | None) -> list[int]:
    """The ends of text that a model directory names for generation; empty where it names none.

    Raises:
        UserError: its file is damaged, or names no ids of tokens.
    """
    file = None if folder is None else folder / _FILE
    if file is None or not file.is_file():
        return []
    found = read_json_object(file).get("eos_token_id")
    ids = as_ids(found)
    if not all(type(each) is int and each >= 0 for each in ids):
        raise UserError(
            f"{file}: eos_token_id {json.dumps(found)}; expected the id of a token (a whole number from 0), or a list "
            "of ids. Copy the file of the model again, or take the field out"
        )
    return ids


def as_ids(eos_token_id: int | list[int] | None) -> list[int]:
    """The ids of transformers' `eos_token_id`."""
    if eos_token_id is None:
        return []
    return list(eos_token_id) if isinstance(eos_token_id, list) else [eos_token_id]
