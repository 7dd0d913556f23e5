"""Iterate the records of data files: json, jsonl, parquet, arrow, csv and txt, each one record at a time.

Text formats may be compressed: `a.jsonl.gz` and `a.jsonl.zst` are files of type jsonl. Every reader streams, so that
memory does not grow with the file. Text is UTF-8 with or without a byte order mark, and line ends are normalised. A
record knows the file and the line (for parquet and arrow: the row) it came from, so that later errors can name it.
A record that cannot be read, where the next one can, is an error, or a record with a `Mistake` for callers that ask.
"""

import codecs
import csv
import glob
import json
import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.compressed import COMPRESSIONS, open_bytes
from mindspeed_llm.tasks.preprocess.json_stream import (
    TOO_DEEP,
    JsonStream,
    depth_error,
    is_too_deep,
    json_error,
    utf8_error,
)

_UTF8_MARK = b"\xef\xbb\xbf"
_ARROW_ROWS = 256
# What stands beside the files of data sets that the datasets library or the user has described.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "state.json")
_NO_OBJECT = "no object with named columns"
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_LOG = logging.getLogger("mindspeed_llm")


class Mistake(NamedTuple):
    """Why a record could not be read: `kind`, the same for all records with the same mistake, and the whole message."""

    kind: str
    message: str


class Record(NamedTuple):
    """One record of a data file: `data` maps columns to values; `line` counts from 1 (parquet and arrow: rows).

    `source` is the number of the data set, where several are mixed. With a `mistake` there are no data.
    """

    file: Path
    line: int
    data: dict[str, Any]
    source: int = 0
    mistake: Mistake | None = None

    @property
    def where(self) -> str:
        """File and line as they stand in messages."""
        return f"{self.file}:{self.line}"


def data_files(path: str | Path) -> list[Path]:
    """Return the data files behind `path`: the file itself, or the data files of a folder in name order.

    Compressed files and others of one type (a.jsonl, b.jsonl.gz) may stand together. Of a folder, hidden files, folders
    in it, and files whose extension is not one of data are left out; the log says once which. Raises UserError when the
    path does not exist, when a folder holds no data file or data files of more than one type (all types are listed),
    and when the type of a file is not one that can be read.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"data file {path} does not exist")
    if not path.is_dir():
        _reader_of(path)
        return [path]
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith((".", "_")))
    files = [entry for entry in entries if entry.is_file() and file_type(entry) in READERS and not _is_about(entry)]
    left_out = tuple(entry.name + "/" * entry.is_dir() for entry in entries if entry not in files)
    by_type: dict[str, list[Path]] = {}
    for file in files:
        _reader_of(file)
        by_type.setdefault(file_type(file), []).append(file)
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


def _is_about(file: Path) -> bool:
    """Whether a file is about data: a description of data sets, or the summary of preprocessed data beside it."""
    prefix = file.name.removesuffix("_summary.json")
    is_summary = prefix != file.name and any(file.parent.glob(f"{glob.escape(prefix)}_*.idx"))
    return is_summary or file.name in _DESCRIPTIONS


def file_type(file: Path) -> str:
    """The extension that says what is in a file, in lower case, without that of its compression."""
    return Path(file.stem).suffix.lower() if file.suffix.lower() in COMPRESSIONS else file.suffix.lower()


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


def read_file(file: Path, *, keep_mistakes: bool = False) -> Iterator[Record]:
    """Yield the records of one file; the reader is chosen by the extension. A file of 0 bytes has none.

    What is no regular file, such as a pipe, is read as JSON lines unless its extension says otherwise. Raises UserError
    naming file and line; with `keep_mistakes` a record that is wrong, where the next one can be told from it, is
    yielded with its mistake instead.
    """
    reader = _reader_of(file)
    if file.is_file() and not file.stat().st_size:
        return
    for line, data in reader(file):
        if isinstance(data, dict):
            yield Record(file, line, data)
            continue
        mistake = data if isinstance(data, Mistake) else _no_object(file, line, data)
        if not keep_mistakes:
            raise UserError(mistake.message)
        yield Record(file, line, {}, mistake=mistake)


def _no_object(file: Path, line: int, value: Any) -> Mistake:
    return Mistake(
        _NO_OBJECT,
        f"{file}:{line}: expected an object with named columns, found {type(value).__name__}",
    )


def _known_types() -> str:
    names = ", ".join(suffix.lstrip(".") for suffix in READERS)
    return f"{names} ({', '.join(suffix.lstrip('.') for suffix in _TEXT_TYPES)} also with {' or '.join(COMPRESSIONS)})"


def _reader_of(file: Path) -> Callable[[Path], Iterator[tuple[int, Any]]]:
    kind = file_type(file)
    if kind not in READERS and file.exists() and not file.is_file():
        return _read_jsonl
    if kind not in READERS:
        raise UserError(f"data file {file} has an unknown type {file.suffix!r}; expected one of {_known_types()}")
    if kind != file.suffix.lower() and kind not in _TEXT_TYPES:
        raise UserError(
            f"data file {file}: {kind.lstrip('.')} files are compressed inside, and are not read from "
            f"{file.suffix} files; decompress it"
        )
    return READERS[kind]


def _lines(file: Path) -> Iterator[tuple[int, str | Mistake]]:
    """Yield (number, text without line end) of the lines of a text file, whatever their line ends.

    A line that is not UTF-8 is a mistake; a file in UTF-16 has no lines that could be told.
    """
    number = 0
    with open_bytes(file) as stream:
        for raw in stream:
            if not number:
                raw = raw.removeprefix(_UTF8_MARK)
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                number += 1
                mistake = utf8_error(file, number, error)
                if number == 1 and raw.startswith(_UTF16_MARKS):
                    raise mistake from error
                yield number, Mistake("text that is not valid UTF-8", str(mistake))
                continue
            text = text.removesuffix("\n").removesuffix("\r")
            for part in text.split("\r") if "\r" in text else (text,):
                number += 1
                yield number, part


def _read_jsonl(file: Path) -> Iterator[tuple[int, Any]]:
    is_first = True
    for line, text in _lines(file):
        if isinstance(text, Mistake):
            yield line, text
        elif text and not text.isspace():
            value = _json_value(file, line, text)
            if is_first and text.lstrip().startswith("["):
                message = (
                    f"{file}:{line}: expected an object with named columns, found a JSON array; name a file that "
                    "holds one array .json, not .jsonl"
                )
                if not isinstance(value, list) or any(isinstance(item, dict) for item in value):
                    # All of the file is meant to be one array.
                    raise UserError(message)
                value = Mistake(_NO_OBJECT, message)
            is_first = False
            yield line, value


def _json_value(file: Path, line: int, text: str) -> Any:
    """The value of a line, or its mistake."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return Mistake("not valid JSON", str(json_error(file, line, error)))
    except RecursionError:
        return Mistake(TOO_DEEP, str(depth_error(f"{file}:{line}")))
    return Mistake(TOO_DEEP, str(depth_error(f"{file}:{line}"))) if is_too_deep(text) else value


def _read_json(file: Path) -> Iterator[tuple[int, Any]]:
    """Read a JSON array of objects element by element; a file without an outer array is read as JSON lines."""
    with open_bytes(file) as stream:
        yield from JsonStream(file, stream).values()


def _read_csv(file: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(1 << 30)
    of_row: list[tuple[int, str]] = []

    def lines() -> Iterator[str]:
        for line, text in _lines(file):
            if isinstance(text, Mistake):
                # Nobody knows whether a quote stood in it.
                raise UserError(text.message)
            of_row.append((line, text + "\n"))
            yield text + "\n"

    # Strict: else a quote that is not closed takes in all rows up to the next one, without a word.
    reader = csv.DictReader(lines(), strict=True)
    try:
        for row in reader:
            of_row.clear()
            if None in row:
                message = f"{file}:{reader.line_num}: the row has more fields than the header"
                yield reader.line_num, Mistake("row with more fields than the header", message)
            else:
                yield reader.line_num, row
    except csv.Error as error:
        opened, last = _last_quote(of_row), of_row[-1][0]
        if opened is None:
            raise UserError(f"{file}:{last}: not valid CSV ({error})") from error
        raise UserError(
            f"{file}:{opened}: not valid CSV: the quoted field that begins in this line is not closed in the right "
            f"place (line {last}: {error}); close it, and double quotes that belong to the text"
        ) from error


def _last_quote(lines: list[tuple[int, str]]) -> int | None:
    """The line of the last quote that opens a field, within the lines of one row of CSV that is not valid; None where
    there is none.
    """
    opened, in_quotes, was_closed, at_start = None, False, False, True
    for line, text in lines:
        for char in text:
            if char == '"' and (in_quotes or was_closed):
                # Two quotes within quotes stand for one: they close and open again.
                in_quotes, was_closed = not in_quotes, in_quotes
            elif char == '"' and at_start:
                opened, in_quotes, at_start = line, True, False
            elif was_closed and char not in ",\n":
                return opened
            elif not in_quotes:
                was_closed, at_start = False, char in ",\n"
    return opened


def _read_txt(file: Path) -> Iterator[tuple[int, Any]]:
    for line, text in _lines(file):
        yield line, text if isinstance(text, Mistake) else {"text": text}


def _read_parquet(file: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as source:
            yield from _rows(source.iter_batches(batch_size=_ARROW_ROWS))
    except (pyarrow.ArrowInvalid, OSError) as error:
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
_TEXT_TYPES = (".json", ".jsonl", ".csv", ".txt")
