"""Token ids -> pieces of readable text, without breaking characters that are spread over several tokens.

ids      [ 40][ 2894][ 19526][  235]          235 completes the character that 19526 begins
pieces   [ I ][ love ][      😀      ]
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_SPACE = "▁"
# What a token says depends on what stands before it: sentencepiece drops the space of the first token, for one. So
# many tokens hold a whole character.
_CONTEXT = 8
# A character has at most four bytes. Tokens that end inside of characters may follow each other in emoji; a longer
# row is no text at all (ids of another tokenizer).
_MAX_HELD = 16
_LOOKS_SPECIAL = re.compile(r"<[|｜].+[|｜]>|(?!<0x)</?\w+>|\[/?\w+\]")  # <0x0A> is a byte

PieceKind = Literal["text", "special", "unknown", "part"]


class Piece(NamedTuple):
    """Tokens start..stop (stop excluded) of a sequence and the text that they give together.

    A `special` piece is one token that stands for itself, such as an end marker; an `unknown` one has an id that is
    not in the vocabulary. A `part` is the beginning of a character whose other tokens belong to the next stretch,
    where the character is text.
    """

    text: str
    start: int
    stop: int
    kind: PieceKind = "text"


class Decoder:
    """Decodes stretches of sequences. `tokenizer` is one of this package or of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = _decode_function(tokenizer)
        self._names: dict[int, str] = {number: name for name, number in tokenizer.get_vocab().items()}
        named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        self._special = {number for number in named if number is not None}
        self._alone: dict[int, Piece] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._names

    def token(self, number: int) -> Piece:
        """One id by itself."""
        if number not in self._alone:
            self._alone[number] = self._piece([number], 0, 1, self._decode([number]) if number in self else "")
        return self._alone[number]

    def pieces(self, ids: np.ndarray, start: int, stop: int, *, at_least: int | None = None) -> list[Piece]:
        """Pieces of ids[start:stop], in order and without gaps, or the first that make up `at_least` tokens.

        What stands around the stretch is looked at, so that a character over both sides of its ends can be read.
        """
        enough = stop if at_least is None else min(stop, start + at_least)
        pieces: list[Piece] = []
        begin = start
        while begin < enough:
            piece = (self._completed(ids, begin, stop) if begin == start else None) or self._next(ids, begin, stop)
            pieces.append(piece)
            begin = piece.stop
        return pieces

    def tail(self, ids: np.ndarray, start: int, stop: int, *, earliest: int) -> list[Piece]:
        """Like `pieces`, but starts behind a character that `start` would cut; looks back to `earliest` for it."""
        begin = max(earliest, start - _MAX_HELD)
        return [piece for piece in self.pieces(ids, begin, stop) if piece.start >= start]

    def _next(self, ids: np.ndarray, begin: int, stop: int) -> Piece:
        context, before = self._context(ids, begin)
        held: list[int] = []
        text = ""
        for number in ids[begin : min(stop, begin + _MAX_HELD)].tolist():
            if number not in self or (held and self._is_special(number)):
                # What was begun before stays broken.
                return self._piece(held or [number], begin, begin + max(len(held), 1), text)
            held.append(number)
            both = self._decode(context + held)
            text = both[len(before) :] if both.startswith(before) else self._decode(held)
            # The space that sentencepiece puts in front of a text has no text of its own.
            if not text.endswith(_BROKEN) and (text or self._names[number] != _SPACE):
                break
        if text.endswith(_BROKEN) and begin + len(held) == stop:
            for after in range(stop + 1, min(len(ids), begin + _MAX_HELD) + 1):
                whole = self._text(ids, begin, after)
                if whole and _BROKEN not in whole:
                    return Piece(whole, begin, stop, "part")
        return self._piece(held, begin, begin + len(held), text)

    def _completed(self, ids: np.ndarray, start: int, stop: int) -> Piece | None:
        """The piece at `start` where it continues a character that was begun before."""
        if not self._text(ids, start, start + 1).startswith(_BROKEN):
            return None
        for begin in range(start - 1, max(start - _CONTEXT, 0) - 1, -1):
            piece = self._next(ids, begin, stop)
            if piece.stop > start and _BROKEN not in piece.text:
                # The token with which the character begins may have text before it.
                before = self._text(ids, begin, start).rstrip(_BROKEN)
                return piece._replace(text=piece.text.removeprefix(before), start=start)
        return None

    def _text(self, ids: np.ndarray, start: int, stop: int) -> str:
        """Text of tokens by themselves; empty where an id is unknown."""
        numbers = ids[start:stop].tolist()
        return self._decode(numbers) if all(number in self for number in numbers) else ""

    def _context(self, ids: np.ndarray, begin: int) -> tuple[list[int], str]:
        """The shortest row of tokens before `begin` without half characters, and its text; both empty without one."""
        for start in range(begin - 1, max(begin - _CONTEXT, 0) - 1, -1):
            context = ids[start:begin].tolist()
            if context[0] not in self:
                break
            text = self._decode(context)
            if _BROKEN not in text:
                return context, text
        return [], ""

    def _piece(self, numbers: Sequence[int], start: int, stop: int, text: str) -> Piece:
        if len(numbers) > 1:
            return Piece(text, start, stop)
        number = numbers[0]
        if number not in self:
            return Piece(f"id {number}", start, stop, "unknown")
        name = self._names[number]
        # Some tokens have no text of their own, such as the control tokens of sentencepiece.
        return Piece(text or name, start, stop, "special" if not text or self._is_special(number) else "text")

    def _is_special(self, number: int) -> bool:
        return number in self._special or _LOOKS_SPECIAL.fullmatch(self._names[number]) is not None


def _decode_function(tokenizer: Any) -> Callable[[list[int]], str]:
    options: dict[str, bool] = {"skip_special_tokens": False}
    if hasattr(tokenizer, "clean_up_tokenization_spaces"):
        # transformers would drop spaces before punctuation, though they are in the data.
        options["clean_up_tokenization_spaces"] = False
    return lambda numbers: tokenizer.decode(numbers, **options)
