"""Rows of the files that benchmarks come in, with every field checked where it is read."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_llm.errors import UserError
from mindspeed_llm.valid_text import invalid_part

_GZIP = b"\x1f\x8b"
_ADVICE_FOR_FILES = "Take the file from the benchmark's own distribution again."
_ADVICE = "Mend the row, or take the file from the benchmark's own distribution again."


@dataclass(frozen=True)
class Row:
    """One row: where it stands ("file, line 3") and its fields as the file has them."""

    place: str
    fields: Mapping[str, object]

    def wrong(self, field: str, expected: str) -> UserError:
        """The error for a field of this row that is not what it should be."""
        found = "nothing" if field not in self.fields else repr(self.fields[field])
        found = found if len(found) <= 80 else f"{found[:80]} ..."
        return UserError(f"{self.place}: field {field!r} is {found}, expected {expected}. {_ADVICE}")

    def text(self, field: str, *, may_be_empty: bool = False) -> str:
        """A field that holds text. Raises UserError: it is missing, no text, or empty where that is not allowed."""
        value = self.fields.get(field)
        if not isinstance(value, str) or not (may_be_empty or value.strip()):
            raise self.wrong(field, "a text" if may_be_empty else "a text that is not empty")
        return value

    def texts(self, field: str, *, at_least: int = 1) -> tuple[str, ...]:
        """A field that holds a list of texts. Raises UserError: it does not, or has too few."""
        value = self.fields.get(field)
        if not isinstance(value, list) or len(value) < at_least or not all(isinstance(item, str) for item in value):
            raise self.wrong(field, f"a list of at least {at_least} texts")
        return tuple(value)

    def letter(self, field: str, letters: str) -> str:
        """A field that holds one of the letters. Raises UserError: it does not."""
        value = self.fields.get(field)
        value = value.strip() if isinstance(value, str) else value
        if not isinstance(value, str) or len(value) != 1 or value not in letters:
            raise self.wrong(field, "one of the letters " + ", ".join(letters))
        return value

    def boolean(self, field: str) -> bool:
        """A field that holds true or false. Raises UserError: it does not."""
        value = self.fields.get(field)
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value


def read_text(path: Path) -> str:
    """A file of UTF-8, packed with gzip or not. Raises UserError: it is not that, or cannot be read."""
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
        text = content.decode("utf-8-sig")
        # As Python reads text files.
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be unpacked ({error}). {_ADVICE_FOR_FILES}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Check the path and its permissions.") from None


def read_jsonl(path: Path) -> Iterator[Row]:
    """The rows of a file with one JSON object a line; blank lines are skipped.

    Raises:
        UserError: a line is no JSON object.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            value = _parsed(line, place)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: no JSON at column {error.colno} ({error.msg}). {_ADVICE}") from None
        yield _row(place, value)


def read_json_list(path: Path, field: str) -> Iterator[Row]:
    """The objects of the list that stands in one field of a JSON file.

    Raises:
        UserError: the file is no JSON, has no such list, or an item of it is no object.
    """
    try:
        content = _parsed(read_text(path), str(path))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}, line {error.lineno}: no JSON at column {error.colno} ({error.msg}). {_ADVICE}"
        ) from None
    items = content.get(field) if isinstance(content, dict) else None
    if not isinstance(items, list):
        raise UserError(f"{path}: field {field!r} is no list, expected a list of objects. {_ADVICE}")
    for number, item in enumerate(items):
        place = f"{path}, item {number} of {field!r}"
        yield _row(place, item)


def _parsed(text: str, place: str) -> object:
    """The value of JSON. Raises UserError: Python cannot hold it; json.JSONDecodeError: it is no JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise _too_deep(place) from None
    except ValueError:
        # Python reads no whole number beyond sys.get_int_max_str_digits().
        raise UserError(f"{place}: a number has too many digits to be read. {_ADVICE}") from None


def _too_deep(place: str) -> UserError:
    return UserError(f"{place}: lists or objects are nested too deeply to be read. {_ADVICE}")


def _row(place: str, value: object) -> Row:
    """The row of a JSON value. Raises UserError: it is no object, or a text in it is no valid Unicode."""
    if not isinstance(value, dict):
        raise UserError(f"{place}: a {type(value).__name__}, expected an object with fields. {_ADVICE}")
    for field, content in value.items():
        name = f"field {field!a}"
        try:
            reason = invalid_part(field, name) or invalid_part(content, name)
        except RecursionError:
            raise _too_deep(place) from None
        if reason is not None:
            raise UserError(f"{place}: {reason}, expected valid text. {_ADVICE}")
    return Row(place, value)


def read_csv(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows of a CSV file. A place names the line on which the row ends.

    Args:
        path: the file.
        columns: the names of the columns where the file has no header line; None: its first line holds them.

    Raises:
        UserError: a row has more or fewer columns than there are names, or the quoting is broken.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    names = list(columns) if columns is not None else None
    try:
        for values in reader:
            if not values:
                continue
            if names is None:
                names = values
                continue
            place = f"{path}, line {reader.line_num}"
            if len(values) != len(names):
                raise UserError(
                    f"{place}: {len(values)} columns, expected {len(names)} ({', '.join(map(repr, names))}). {_ADVICE}"
                )
            yield Row(place, dict(zip(names, values, strict=True)))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: no CSV ({error}). {_ADVICE}") from None
