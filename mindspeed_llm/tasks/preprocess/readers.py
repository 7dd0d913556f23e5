"""Iterate the records of data files: json, jsonl, parquet, arrow, csv and txt, each one record at a time.

Every reader streams, so that memory does not grow with the file. Text is UTF-8 with or without a byte order mark, and
line ends are normalised. A record knows the file and the line (for parquet and arrow: the row) it came from, so that
later errors can name it.
"""

import csv
import json
import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from mindspeed_llm.errors import UserError

_CHUNK_CHARS = 1 << 20
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LOG = logging.getLogger("mindspeed_llm")


class Record(NamedTuple):
    """One record of a data file: `data` maps columns to values; `line` counts from 1 (parquet and arrow: rows).

    `source` is the number of the data set, where several are mixed.
    """

    file: Path
    line: int
    data: dict[str, Any]
    source: int = 0

    @property
    def where(self) -> str:
        """File and line as they stand in messages."""
        return f"{self.file}:{self.line}"


def data_files(path: str | Path) -> list[Path]:
    """Return the data files behind `path`: the file itself, or the data files of a folder in name order.

    Of a folder, hidden files, folders in it, and files whose extension is not one of data are left out; the log says
    once which. Raises UserError when the path does not exist, when a folder holds no data file or data files of more
    than one type (all types are listed), and when the type of a file is not one that can be read.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"data file {path} does not exist")
    if path.is_file():
        _reader_of(path)
        return [path]
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith((".", "_")))
    files = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in READERS]
    left_out = tuple(entry.name + "/" * entry.is_dir() for entry in entries if entry not in files)
    by_type: dict[str, list[Path]] = {}
    for file in files:
        by_type.setdefault(file.suffix.lower(), []).append(file)
    if not by_type:
        found = f" ({_some(left_out)})" if left_out else ""
        raise UserError(f"data folder {path} holds no data files{found}; expected files of type {_known_types()}")
    if len(by_type) > 1:
        found = ", ".join(f"{suffix}: {len(group)}" for suffix, group in sorted(by_type.items()))
        raise UserError(
            f"data folder {path} mixes file types ({found}); keep files of one type in it, or name one file"
        )
    if left_out:
        _report_left_out(path, left_out)
    return files


@cache
def _report_left_out(folder: Path, names: tuple[str, ...]) -> None:
    _LOG.info("data folder %s: left out, since no data files: %s", folder, _some(names))


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def iterate_records(path: str | Path) -> Iterator[Record]:
    """Yield the records of a file, or of all files of a folder in name order.

    Raises UserError naming file and line when a file cannot be decoded.
    """
    for file in data_files(path):
        yield from read_file(file)


def read_file(file: Path) -> Iterator[Record]:
    """Yield the records of one file; the reader is chosen by the extension. A file of 0 bytes has none."""
    reader = _reader_of(file)
    if not file.stat().st_size:
        return
    try:
        for line, data in reader(file):
            if not isinstance(data, dict):
                raise UserError(f"{file}:{line}: expected an object with named columns, found {type(data).__name__}")
            yield Record(file, line, data)
    except UnicodeDecodeError as error:
        with file.open("rb") as stream:
            kind = ", but UTF-16" if stream.read(2) in _UTF16_MARKS else ""
        raise UserError(
            f"{file} is not valid UTF-8 text{kind} (byte {error.start}: {error.reason}); save it as UTF-8"
        ) from error


def _known_types() -> str:
    return ", ".join(suffix.lstrip(".") for suffix in READERS)


def _reader_of(file: Path) -> Callable[[Path], Iterator[tuple[int, Any]]]:
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        raise UserError(f"data file {file} has an unknown type {file.suffix!r}; expected one of {_known_types()}")
    return reader


def _open_text(file: Path, newline: str | None = None) -> TextIO:
    return file.open(encoding="utf-8-sig", newline=newline)


def _json_error(file: Path, line: int, error: json.JSONDecodeError) -> UserError:
    return UserError(f"{file}:{line}: not valid JSON ({json_problem(error)} column {error.colno})")


def json_problem(error: json.JSONDecodeError) -> str:
    """What is wrong with a JSON text, to be followed by the place."""
    return error.msg if error.msg.endswith(" at") else f"{error.msg} at"


def _read_jsonl(file: Path) -> Iterator[tuple[int, Any]]:
    with _open_text(file) as stream:
        is_first = True
        for line, text in enumerate(stream, start=1):
            if text.strip():
                if is_first and text.lstrip().startswith("["):
                    raise UserError(
                        f"{file}:{line}: expected an object with named columns, found a JSON array; name a file that "
                        "holds one array .json, not .jsonl"
                    )
                is_first = False
                try:
                    yield line, json.loads(text)
                except json.JSONDecodeError as error:
                    raise _json_error(file, line, error) from error


def _read_json(file: Path) -> Iterator[tuple[int, Any]]:
    """Read a JSON array of objects element by element; a file without an outer array is read as JSON lines."""
    with _open_text(file) as stream:
        buffer = _JsonBuffer(file, stream)
        first = buffer.peek()
        if first is None:
            return
        if first == "[":
            yield from buffer.array_items()
            return
    yield from _read_concatenated_json(file)


def _read_concatenated_json(file: Path) -> Iterator[tuple[int, Any]]:
    with _open_text(file) as stream:
        buffer = _JsonBuffer(file, stream)
        while buffer.peek() is not None:
            yield buffer.value()


class _JsonBuffer:
    """Decode JSON values one after the other from a text stream, holding little more than one value in memory."""

    def __init__(self, file: Path, stream: TextIO) -> None:
        self._file, self._stream = file, stream
        self._text, self._pos, self._line, self._ended = "", 0, 1, False
        self._decoder = json.JSONDecoder()

    def _fill(self) -> bool:
        chunk = self._stream.read(max(_CHUNK_CHARS, len(self._text) - self._pos))
        self._text, self._pos = self._text[self._pos :] + chunk, 0
        self._ended = not chunk
        return bool(chunk)

    def _advance(self, end: int) -> None:
        self._line += self._text.count("\n", self._pos, end)
        self._pos = end

    def peek(self) -> str | None:
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

    def take(self) -> None:
        self._advance(self._pos + 1)

    def value(self) -> tuple[int, Any]:
        """Decode the value at the current position; returns (line, value)."""
        line = self._line
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._pos)
            except json.JSONDecodeError as error:
                if self._fill():
                    continue
                at = self._line + self._text.count("\n", 0, error.pos)
                raise _json_error(self._file, at, error) from error
            # A number at the very end of the buffer may go on in the next chunk; objects cannot.
            if end == len(self._text) and not self._ended and self._fill():
                continue
            self._advance(end)
            return line, value

    def array_items(self) -> Iterator[tuple[int, Any]]:
        self.take()
        if self.peek() == "]":
            return
        while True:
            if self.peek() is None:
                raise UserError(f"{self._file}:{self._line}: the JSON array is not closed")
            yield self.value()
            following = self.peek()
            if following not in (",", "]"):
                found = "the end of the file" if following is None else repr(following)
                raise UserError(f"{self._file}:{self._line}: expected ',' or ']' in the JSON array, found {found}")
            self.take()
            if following == "]":
                return


def _read_csv(file: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(1 << 30)
    with _open_text(file, newline="") as stream:
        reader = csv.DictReader(stream)
        for row in reader:
            if None in row:
                raise UserError(f"{file}:{reader.line_num}: the row has more fields than the header")
            yield reader.line_num, row


def _read_txt(file: Path) -> Iterator[tuple[int, Any]]:
    with _open_text(file) as stream:
        for line, text in enumerate(stream, start=1):
            yield line, {"text": text.removesuffix("\n")}


def _read_parquet(file: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as source:
            yield from _rows(source.iter_batches(batch_size=1000))
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{file} is not a valid parquet file: {error}") from error


def _read_arrow(file: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        try:
            reader = pyarrow.ipc.open_stream(source)
            batches = iter(reader)
        except pyarrow.ArrowInvalid:
            # The random-access layout has a footer; the streaming one has not.
            try:
                table = pyarrow.ipc.open_file(source)
            except pyarrow.ArrowInvalid as error:
                raise UserError(f"{file} is not a valid arrow file: {error}") from error
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        yield from _rows(batches)


def _rows(batches: Any) -> Iterator[tuple[int, Any]]:
    row = 0
    for batch in batches:
        for data in batch.to_pylist():
            row += 1
            yield row, data


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".csv": _read_csv,
    ".txt": _read_txt,
}
"""File extension -> reader; a reader yields (line, value)."""
