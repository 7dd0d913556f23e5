"""Texts that no tokenizer takes and no file holds: half of a surrogate pair, or bytes that are not in the encoding of
the terminal. JSON can write the first as an escape, and Python keeps the second in command lines and typed lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_llm.errors import UserError

# Where Python keeps bytes that it cannot decode ("surrogateescape").
_KEPT_BYTES = range(0xDC80, 0xDD00)
_SHOWN = 60


def why_invalid(text: str, *, encoding: str | None = None) -> str | None:
    """What makes `text` no text that UTF-8 can write; None: nothing does.

    Args:
        encoding: what the text was decoded from, where bytes of another encoding are kept in it; None: it comes from
            a file, which was decoded without an exception.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if encoding is not None and code in _KEPT_BYTES:
            return f"holds the byte 0x{code - 0xDC00:02x} at character {error.start}, which is not {encoding.upper()}"
        return f"holds \\u{code:04x} at character {error.start}, one half of a surrogate pair"
    return None


def invalid_part(value: Any, name: str) -> str | None:
    """Where a value of JSON holds a text that is none, and why, such as "messages[0].content holds ..."; None: nowhere.

    Args:
        name: what the value is called.

    Raises:
        RecursionError: the value is nested too deeply.
    """
    if isinstance(value, str):
        reason = why_invalid(value)
        return None if reason is None else f"{name} {reason}"
    if isinstance(value, dict):
        names = (invalid_part(key, f"the name {key!a} in {name}") for key in value)
        parts = (invalid_part(item, f"{name}.{key}") for key, item in value.items())
        return next(filter(None, (*names, *parts)), None)
    if isinstance(value, list):
        return next(filter(None, (invalid_part(item, f"{name}[{place}]") for place, item in enumerate(value))), None)
    return None


def check_words(argv: Sequence[str], encoding: str) -> None:
    """Raise UserError for a word of the command line that is no valid text; names the flag that it belongs to.

    Args:
        encoding: that of the command line.
    """
    flag = ""
    for word in argv:
        name, _, value = word.partition("=")
        if word.startswith("--"):
            flag, word = name, value
        if reason := why_invalid(flag, encoding=encoding) or why_invalid(word, encoding=encoding):
            raise UserError(f"{flag + ': ' if flag else ''}{word[:_SHOWN]!a} {reason}; expected valid text")
