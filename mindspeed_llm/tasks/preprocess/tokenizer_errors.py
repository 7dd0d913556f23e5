"""Texts that a tokenizer cannot take: the error for the user."""

from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.records.fields import BadRecord
from mindspeed_llm.valid_text import invalid_part

TOKENIZER_ERRORS = (TypeError, ValueError, OverflowError)
"""What tokenizers raise for a text that they cannot take."""


def not_tokenized(record: Record, error: Exception) -> BadRecord:
    """The error for a record whose text the tokenizer has refused with `error`."""
    for key, value in record.data.items():
        if invalid_part(value, key) is not None:
            return BadRecord(
                f"{record.where}: key {key!r}: the text holds half of a surrogate pair (such as \\ud800), which is no "
                "character; repair the text or remove the record",
                f"key {key!r} holds half of a surrogate pair",
            )
    kind = "the tokenizer cannot take the text"
    return BadRecord(f"{record.where}: {kind} ({type(error).__name__}: {error})", kind)
