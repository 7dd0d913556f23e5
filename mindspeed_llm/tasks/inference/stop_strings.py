"""The text of an answer that grows by tokens, and strings that end it wherever tokens begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""The text of token ids, special tokens left out."""

_UNFINISHED = "\ufffd"
"""What decoders put for bytes that are no whole character (yet)."""


class GrowingText:
    """The text of tokens that come one after the other; only the last few are decoded at each.

    tokens   a b c d | e f | g h
             settled   |     `_new`
                     `_before`: decoded with the new ones, since a token may read differently where a text begins
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._settled = ""
        self._pending = ""
        self._before: list[int] = []
        self._before_length = 0
        self._new: list[int] = []
        self._ends: list[tuple[int, bool]] = []
        """After each token: the length of the text, and whether bytes of an unfinished character follow."""

    @property
    def text(self) -> str:
        """All that is certain: a character whose bytes are not all there yet is left out."""
        return self._settled + self._pending

    def add(self, token: int) -> None:
        """One more token."""
        self._new.append(token)
        decoded = self._decode(self._before + self._new)
        whole = decoded.rstrip(_UNFINISHED)
        self._pending = whole[self._before_length :]
        # Tokens without text (special ones) never stand alone before new ones: the next would begin a text again.
        if self._pending and len(whole) == len(decoded):
            self._settled += self._pending
            self._pending = ""
            self._before, self._new = self._new, []
            self._before_length = len(self._decode(self._before))
        self._ends.append((len(self._settled) + len(self._pending), len(whole) < len(decoded)))

    def tokens_before(self, position: int) -> int:
        """How many of the tokens come before the one in which the character at `position` begins."""
        # From the end: what is asked about is near it.
        count = len(self._ends)
        while count and self._ends[count - 1][0] > position:
            count -= 1
        # The first bytes of the character may be in tokens before.
        while count and self._ends[count - 1] == (position, True):
            count -= 1
        return count


def first_stop(text: str, strings: Sequence[str], *, checked: int = 0) -> int | None:
    """Where the first of the strings begins in `text`; None where it has none. The first `checked` characters are known
    to hold none that is whole.
    """
    found = [text.find(string, max(checked - len(string) + 1, 0)) for string in strings]
    return min((place for place in found if place >= 0), default=None)


def certain_length(text: str, strings: Sequence[str]) -> int:
    """How many characters of `text` cannot be of one of the strings that has only begun at its end."""
    for start in range(max(len(text) - max(map(len, strings), default=0) + 1, 0), len(text)):
        if any(string.startswith(text[start:]) for string in strings):
            return start
    return len(text)
