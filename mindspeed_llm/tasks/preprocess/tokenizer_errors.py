"""Texts that a tokenizer cannot take: the error for the user."""

from collections.abc import Mapping
from typing import Any

from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.records.fields import BadRecord

TOKENIZER_ERRORS = (TypeError, ValueError, OverflowError)
"""What tokenizers raise for a text that they cannot take."""


def not_tokenized(record: Record, error: Exception) -> BadRecord:
    """The error for a record whose text the tokenizer has refused with `error`."""
    for key, value in record.data.items():
        if _has_lone_surrogate(value):
            return BadRecord(
                f"{record.where}: key {key!r}: the text holds half of a surrogate pair (such as \\ud800), which is no "
                "character; repair the text or remove the record",
                f"key {key!r} holds half of a surrogate pair",
            )
    kind = "the tokenizer cannot take the text"
    return BadRecord(f"{record.where}: {kind} ({type(error).__name__}: {error})", kind)


def _has_lone_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return any("\ud800" <= char <= "\udfff" for char in value)
    if isinstance(value, Mapping):
        return any(map(_has_lone_surrogate, value.values()))
    return isinstance(value, list) and any(map(_has_lone_surrogate, value))
