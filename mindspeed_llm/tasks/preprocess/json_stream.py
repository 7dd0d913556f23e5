"""JSON values one after the other from a stream, holding little more than one value in memory."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mindspeed_llm.errors import UserError

_CHUNK_BYTES = 1 << 20
# Far more than any record needs, and far less than what copying and rendering the value could not follow.
_DEEPEST = 200
_STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_BRACKETS = re.compile(r"[\[\]{}]")
TOO_DEEP = "JSON that is nested too deeply"


def is_too_deep(text: str) -> bool:
    """Whether the brackets of a text that is valid JSON are nested more than 200 deep."""
    if text.count("[") + text.count("{") <= _DEEPEST:
        return False
    # Program text has many, all of them in strings.
    depth = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > _DEEPEST:
            return True
    return False


def depth_error(where: str) -> UserError:
    """The error for a value that is nested too deeply; `where` is file and line."""
    return UserError(f"{where}: {TOO_DEEP} (more than {_DEEPEST} levels of [ and {{); flatten it, or leave it out")


def json_error(file: Path, line: int, error: json.JSONDecodeError) -> UserError:
    """The error for text that is not valid JSON."""
    return UserError(f"{file}:{line}: not valid JSON ({json_problem(error)} column {error.colno})")


def json_problem(error: json.JSONDecodeError) -> str:
    """What is wrong with a JSON text, to be followed by the place."""
    return error.msg if error.msg.endswith(" at") else f"{error.msg} at"


def utf8_error(file: Path, line: int, error: UnicodeDecodeError) -> UserError:
    """The error for bytes that are not UTF-8."""
    kind = ", but UTF-16" if line == 1 and error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else ""
    return UserError(
        f"{file}:{line}: {file.name} is not valid UTF-8 text{kind} ({error.reason}: byte "
        f"0x{error.object[error.start]:02x}); save it as UTF-8"
    )


class JsonStream:
    """Decodes the values of a stream; a value is returned with the line that it begins on."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file, self._stream = file, stream
        self._text, self._pos, self._line, self._ended = "", 0, 1, False
        self._decoder = json.JSONDecoder()
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()

    def values(self) -> Iterator[tuple[int, Any]]:
        """The elements of an outer array, or the values that follow each other where there is none."""
        first = self._peek()
        if first == "[":
            yield from self._array_items()
        else:
            while self._peek() is not None:
                yield self._value()

    def _fill(self) -> bool:
        data = self._stream.read(max(_CHUNK_BYTES, len(self._text) - self._pos))
        try:
            chunk = self._utf8.decode(data, final=not data)
        except UnicodeDecodeError as error:
            newlines = self._text.count("\n", self._pos) + error.object[: error.start].count(b"\n")
            raise utf8_error(self._file, self._line + newlines, error) from error
        self._text, self._pos = self._text[self._pos :] + chunk, 0
        self._ended = not data
        return bool(data)

    def _advance(self, end: int) -> None:
        self._line += self._text.count("\n", self._pos, end)
        self._pos = end

    def _peek(self) -> str | None:
        """Skip white space and return the next character, None at the end of the file."""
        while True:
            end = self._pos
            while end < len(self._text) and self._text[end].isspace():
                end += 1
            self._advance(end)
            if end < len(self._text):
                return self._text[end]
            if not self._fill():
                return None

    def _value(self) -> tuple[int, Any]:
        line = self._line
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._pos)
            except RecursionError as error:
                raise depth_error(f"{self._file}:{line}") from error
            except json.JSONDecodeError as error:
                begin = self._pos
                if self._fill():
                    continue
                at = self._line + error.doc.count("\n", begin, error.pos)
                raise json_error(self._file, at, error) from error
            # A number at the very end of the buffer may go on in the next chunk; objects cannot.
            if end == len(self._text) and not self._ended and self._fill():
                continue
            if is_too_deep(self._text[self._pos : end]):
                raise depth_error(f"{self._file}:{line}")
            self._advance(end)
            return line, value

    def _array_items(self) -> Iterator[tuple[int, Any]]:
        self._advance(self._pos + 1)
        is_empty = self._peek() == "]"
        if is_empty:
            self._advance(self._pos + 1)
        while not is_empty:
            if self._peek() is None:
                raise UserError(f"{self._file}:{self._line}: the JSON array is not closed")
            yield self._value()
            following = self._peek()
            if following not in (",", "]"):
                found = "the end of the file" if following is None else repr(following)
                raise UserError(f"{self._file}:{self._line}: expected ',' or ']' in the JSON array, found {found}")
            self._advance(self._pos + 1)
            if following == "]":
                break
        if (following := self._peek()) is not None:
            raise UserError(f"{self._file}:{self._line}: expected nothing after the JSON array, found {following!r}")
