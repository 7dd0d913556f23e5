"""Characters that cannot be seen, made visible; what could steer a terminal or reorder a line is made harmless."""

import unicodedata
from collections.abc import Iterator
from typing import Literal

_ASCII_SIGNS = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_SIGNS = {**_ASCII_SIGNS, "\n": "↵", "\t": "⇥"}
_PLAIN_SPACES = " \u3000"
_JOINERS = "\u200c\u200d"  # they belong to words and emoji

PartKind = Literal["text", "newline", "tab", "sign"]


def visible(text: str, *, ascii_signs: bool = False) -> Iterator[tuple[PartKind, str]]:
    """Yield (kind, shown) for the parts of a text.

    `text` is shown as it is. A `newline` or `tab` gives the sign to show before the character itself; a `sign`
    (`\\u200b` for a zero-width space) stands in place of a character.
    """
    named = _ASCII_SIGNS if ascii_signs else _SIGNS
    kinds: dict[str, PartKind] = {"\n": "newline", "\t": "tab"}
    start = 0
    for position, character in enumerate(text):
        if not _hidden(character):
            continue
        if start < position:
            yield "text", text[start:position]
        start = position + 1
        yield kinds.get(character, "sign"), named.get(character) or escaped(character)
    if start < len(text):
        yield "text", text[start:]


def one_line(text: str, *, ascii_signs: bool = False) -> str:
    """The text with signs in place of all characters that cannot be seen, for a line of its own."""
    return "".join(shown for _, shown in visible(text, ascii_signs=ascii_signs))


def escaped(text: str) -> str:
    """The characters as Python writes them in ASCII: `\\x1b`, `\\u200b`."""
    return "".join(f"\\x{ord(c):02x}" if ord(c) < 256 else c.encode("ascii", "backslashreplace").decode() for c in text)


def _hidden(character: str) -> bool:
    if " " <= character <= "~":
        return False
    category = unicodedata.category(character)
    if category == "Zs":
        return character not in _PLAIN_SPACES
    if category == "Cf":
        # Tags (U+E0020 and up) are parts of flags.
        return character not in _JOINERS and not 0xE0020 <= ord(character) <= 0xE007F
    return category in ("Cc", "Cs", "Cn", "Co", "Zl", "Zp")
