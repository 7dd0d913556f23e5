"""Every file type gives the same records; mistakes name the file and the line."""

import csv
import gzip
import json
import logging
import os
import threading

import pytest
import zstandard

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import compressed, json_stream
from mindspeed_llm.tasks.preprocess.readers import data_files, iterate_records, read_file

LINE = b'{"a": "' + b"x" * 90 + b'"}\n'
LONG = LINE.replace(b"\n", b",\n")
ROWS = [{"text": "one", "n": "1"}, {"text": "zwei, drei\nvier", "n": "2"}, {"text": '五 🙂 "q"', "n": "3"}]


def _write(path, kind):
    if kind == "json":
        path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    elif kind == "csv":
        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, ["text", "n"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist(ROWS)
        if kind == "parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.OSFile(str(path), "wb") as sink:
                new = pyarrow.ipc.new_stream if kind == "arrow" else pyarrow.ipc.new_file
                with new(sink, table.schema) as writer:
                    writer.write_table(table)


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet", "arrow", "arrow_file"])
def test_all_types_give_the_same_records(tmp_path, kind):
    file = tmp_path / f"data.{kind.removesuffix('_file')}"
    _write(file, kind)
    assert [record.data for record in iterate_records(file)] == ROWS


def test_txt_gives_one_record_per_line(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffone\r\n\r\nlast without newline 谢".encode())
    assert [(r.line, r.data["text"]) for r in iterate_records(file)] == [
        (1, "one"),
        (2, ""),
        (3, "last without newline 谢"),
    ]


def test_bom_and_blank_lines_in_jsonl(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": 2}\r\n')
    assert [(r.line, r.data) for r in iterate_records(file)] == [(1, {"a": 1}), (3, {"a": 2})]


def test_json_is_read_in_small_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "_CHUNK_BYTES", 7)
    file = tmp_path / "a.json"
    file.write_text(json.dumps(ROWS, indent=2, ensure_ascii=False), encoding="utf-8")
    assert [record.data for record in iterate_records(file)] == ROWS
    assert [record.line for record in iterate_records(file)] == [2, 6, 10]


@pytest.mark.parametrize("text", ["", "   \n", "[]"])
def test_files_without_records(tmp_path, text):
    file = tmp_path / "a.json"
    file.write_text(text)
    assert list(iterate_records(file)) == []


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow"])
def test_files_of_0_bytes_have_no_records(tmp_path, kind):
    file = tmp_path / f"a.{kind}"
    file.touch()
    assert list(iterate_records(file)) == []


def test_a_folder_without_data_lists_what_is_there(tmp_path):
    (tmp_path / "README.md").touch()
    with pytest.raises(UserError, match=r"holds no data files \(README\.md\); expected"):
        data_files(tmp_path)


def test_json_lines_in_a_json_file(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"a": 1}\n{"a": 2}\n')
    assert [record.data for record in iterate_records(file)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl:2: not valid JSON"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: expected an object"),
        ("a.json", b'[{"a": 1},\n{"a" 2}]', r"a\.json:2: not valid JSON"),
        ("a.json", b'[{"a": 1}\n{"a": 2}]', r"a\.json:2: expected ',' or '\]'"),
        ("a.json", b'[{"a": 1},\n', r"a\.json:2: the JSON array is not closed"),
        (
            "a.jsonl",
            b'\n[{"a": 1},\n{"a": 2}]',
            r"a\.jsonl:2: .* found a JSON array; name a file .* \.json, not \.jsonl",
        ),
        ("a.jsonl", b'{"a": "b\n', r"not valid JSON \(Unterminated string starting at column 7\)"),
        ("a.json", b'[{"a": 1}]\n{"a": 2}', r"a\.json:2: expected nothing after the JSON array, found '\{'"),
        ("a.json", b"[]\n[]", r"a\.json:2: expected nothing after the JSON array, found '\['"),
        ("a.jsonl", b'{"a" 1}\n', r"not valid JSON \(Expecting ':' delimiter at column 6\)"),
        ("a.txt", b"a\n\xff", r"a\.txt:2: .*not valid UTF-8 text \(invalid start byte: byte 0xff\); save it as UTF-8"),
        (
            "a.jsonl",
            LINE * 19999 + b'{"a": "\xe9"}\n',
            r"a\.jsonl:20000: .*not valid UTF-8 .*byte 0xe9",
        ),
        ("a.json", b"[" + LONG * 19999 + b'{"a": "\xe9"}]', r"a\.json:20000: .*not valid UTF-8 .*0xe9"),
        ("a.json", b"[" + LONG * 19999 + b'{"a": }]', r"a\.json:20000: not valid JSON"),
        ("a.json", b'[{"a": "\xe8\xb0', r"a\.json:1: .*not valid UTF-8 .*byte 0xe8"),
        ("a.csv", b"a,b\n1,2\n1,\xe9\n", r"a\.csv:3: .*not valid UTF-8"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), r"a\.jsonl is not valid UTF-8 text, but UTF-16 .*; save it as UTF-8"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", r"a\.csv:3: the row has more fields"),
        # A quote that is not closed, up to the end and up to the next quote; after another field of several lines.
        ("a.csv", b'a,b\n1,2\n3,"x\n4,5\n', r"a\.csv:3: .* begins in this line is not closed .*line 4: unexpected end"),
        ("a.csv", b'a,b\n1,"x\n2,"y"\n', r"a\.csv:2: .* not closed in the right place \(line 3: ',' expected"),
        ("a.csv", b'a,b\n"p\n""q""\n","x""\ny\n', r"a\.csv:4: .* not closed .*line 5"),
        ("a.csv", b'a,b\n1,2\n3,"cut of', r"a\.csv:3: .* not closed"),
        (
            "a.jsonl",
            b'{"a": 1}\n{"a": ' + b"[" * 300 + b"]" * 300 + b"}\n",
            r"a\.jsonl:2: JSON that is nested too deeply",
        ),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: expected an object"),
        ("a.jsonl", b'{"a": ' * 100_000, r"a\.jsonl:1: JSON that is nested too deeply"),
        (
            "a.json",
            b'[{"a": 1},\n{"a": ' + b"[" * 300 + b"]" * 300 + b"}]",
            r"a\.json:2: JSON that is nested too deeply",
        ),
        ("a.json", b'[{"a": 1},\n' + b'{"a": ' * 100_000, r"a\.json:2: JSON that is nested too deeply"),
        ("a.parquet", b"no parquet", r"a\.parquet is not a valid parquet file"),
        ("a.arrow", b"no arrow", r"a\.arrow is not a valid arrow file"),
        ("a.xml", b"<a/>", r"unknown type '\.xml'; expected one of json, jsonl"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(iterate_records(file))


def test_mistakes_are_kept_where_the_next_record_can_be_told(tmp_path):
    deep = b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}"
    wide = b'{"a": "' + b"[{" * 300 + b'\\"", "b": [' + b",".join([b"[]"] * 300) + b"]}"
    lines = (b'{"a": 1}', b'{"a": ', b"7", deep, b'{"a": "\xff"}', b"", wide, b'{"a": 2}')
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    records = list(read_file(tmp_path / "a.jsonl", keep_mistakes=True))
    found = [(record.line, record.mistake and record.mistake.kind) for record in records]
    assert found == [
        (1, None),
        (2, "not valid JSON"),
        (3, "no object with named columns"),
        (4, "JSON that is nested too deeply"),
        (5, "text that is not valid UTF-8"),
        (7, None),
        (8, None),
    ]
    assert all(f"a.jsonl:{record.line}: " in record.mistake.message for record in records if record.mistake)
    assert all(record.data == {} for record in records if record.mistake)

    (tmp_path / "a.csv").write_bytes(b"a,b\n1,2,3\n4,5\n")
    assert [bool(record.mistake) for record in read_file(tmp_path / "a.csv", keep_mistakes=True)] == [True, False]
    (tmp_path / "a.json").write_bytes(b'[7, {"a": 1}]')
    assert [bool(record.mistake) for record in read_file(tmp_path / "a.json", keep_mistakes=True)] == [True, False]
    (tmp_path / "b.jsonl").write_bytes(b'[1, 2]\n{"a": 1}\n')
    assert [bool(record.mistake) for record in read_file(tmp_path / "b.jsonl", keep_mistakes=True)] == [True, False]
    for name, content in (
        ("c.jsonl", b'[{"a": 1}]\n'),
        ("c.json", b'[{"a": 1}, {"a" 2}, {"a": 3}]'),
        ("c.csv", b'a,b\n1,"x\n2,"y"\n'),
        ("d.csv", b'a,b\n1,"\xff\n2,3\n'),
        ("d.jsonl", '{"a": 1}\n'.encode("utf-16")),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            list(read_file(tmp_path / name, keep_mistakes=True))


def test_quotes_in_csv_as_the_standard_has_them(tmp_path):
    content = 'a,b\n"x\n""y"", z",2\n\n"",""\n"""",p"q\n'
    (tmp_path / "a.csv").write_text(content, encoding="utf-8")
    expected = [{"a": 'x\n"y", z', "b": "2"}, {"a": "", "b": ""}, {"a": '"', "b": 'p"q'}]
    assert [record.data for record in read_file(tmp_path / "a.csv")] == expected
    assert list(csv.DictReader(content.splitlines(keepends=True))) == expected


def test_folders(tmp_path, caplog):
    with pytest.raises(UserError, match="does not exist"):
        data_files(tmp_path / "none")
    with pytest.raises(UserError, match="holds no data files; expected files of type json, jsonl"):
        data_files(tmp_path)
    for name in ("b.jsonl", "a.jsonl", ".hidden"):
        (tmp_path / name).write_text('{"text": "' + name + '"}')
    assert [record.data["text"] for record in iterate_records(tmp_path)] == ["a.jsonl", "b.jsonl"]
    for name in ("README.md", ".gitattributes", "LICENSE", "data.jsonl.bz2"):
        (tmp_path / name).write_text("x")
    (tmp_path / "more").mkdir()
    caplog.set_level(logging.INFO, "mindspeed_llm")
    for _ in range(2):
        assert [file.name for file in data_files(tmp_path)] == ["a.jsonl", "b.jsonl"]
    assert caplog.text.count("left out, since no data files: LICENSE, README.md, data.jsonl.bz2, more/") == 1
    (tmp_path / "c.txt").write_text("x")
    with pytest.raises(UserError, match=r"mixes file types \(\.jsonl: 2, \.txt: 1\)"):
        data_files(tmp_path)


PACKED = {
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.ZstdCompressor(write_content_size=False).compress(data),
    ".ZST": lambda data: zstandard.ZstdCompressor(level=19).compress(data),
}


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("kind", ["json", "jsonl", "csv"])
def test_compressed_text(tmp_path, kind, suffix):
    plain = tmp_path / f"data.{kind}"
    _write(plain, kind)
    file = tmp_path / f"data.{kind}{suffix}"
    file.write_bytes(PACKED[suffix](b"\xef\xbb\xbf" + plain.read_bytes()))
    assert [(r.line, r.data) for r in iterate_records(file)] == [(r.line, r.data) for r in iterate_records(plain)]


@pytest.mark.parametrize("suffix", PACKED)
def test_compressed_parts_follow_each_other(tmp_path, suffix):
    file = tmp_path / f"a.txt{suffix}"
    file.write_bytes(b"".join(map(PACKED[suffix], (b"one\r\ntw", b"o", b"", b"\nthree"))))
    assert [record.data["text"] for record in iterate_records(file)] == ["one", "two", "three"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_archives(tmp_path, suffix):
    lines = "".join(f'{{"text": "{number:x}{number * 7919 % 65521:x}"}}\n' for number in range(20000)).encode()
    packed = PACKED[suffix](lines)
    file = tmp_path / f"a.jsonl{suffix}"
    for size in (len(packed) - 1, len(packed) // 2, 7):
        file.write_bytes(packed[:size])
        with pytest.raises(UserError, match=rf"a\.jsonl\{suffix} is cut off: its compressed data ends too early"):
            list(iterate_records(file))
    for damaged in (b"not compressed", packed[:5000] + b"\0" * 50 + packed[5050:]):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"a\.jsonl\{suffix}.* is damaged|not valid JSON"):
            list(iterate_records(file))


def test_an_archive_is_read_in_small_pieces(tmp_path, monkeypatch):
    """A megabyte of the same letter is a few bytes: it must not become a megabyte of memory at once."""
    sizes = []
    file = tmp_path / "a.txt.zst"
    file.write_bytes(PACKED[".zst"]((b"a" * 99 + b"\n") * 10000))
    into = compressed._Pieces.readinto
    monkeypatch.setattr(compressed._Pieces, "readinto", lambda self, b: sizes.append(into(self, b)) or sizes[-1])
    assert sum(1 for _ in iterate_records(file)) == 10000
    assert sum(sizes) == 10**6 and max(sizes) <= compressed._BUFFER


def test_compressed_and_plain_files_of_one_type_stand_together(tmp_path):
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"n": 2}'))
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 1}')
    (tmp_path / "c.jsonl.zst").write_bytes(PACKED[".zst"](b'{"n": 3}'))
    assert [record.data["n"] for record in iterate_records(tmp_path)] == [1, 2, 3]
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(UserError, match=r"mixes file types \(\.jsonl: 3, \.txt: 1\)"):
        data_files(tmp_path)


def test_columnar_files_are_not_compressed_again(tmp_path):
    for name in ("a.parquet.gz", "a.arrow.zst"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(UserError, match=r"(parquet|arrow) files are compressed inside, and are not read from \."):
            data_files(tmp_path / name)
    with pytest.raises(UserError, match="compressed inside"):
        data_files(tmp_path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_of_all_systems(tmp_path, end):
    texts = {"a.txt": ["one", "", "two"], "a.jsonl": ['{"n": 1}', "", '{"n": 2}'], "a.csv": ["n", "1", '"2', 'x"']}
    found = {}
    for name, lines in texts.items():
        for last in ("", end):
            (tmp_path / name).write_bytes((end.join(lines) + last).encode())
            found[name] = [(record.line, record.data) for record in iterate_records(tmp_path / name)]
            if name == "a.txt":
                assert found[name] == [(1, {"text": "one"}), (2, {"text": ""}), (3, {"text": "two"})]
            elif name == "a.jsonl":
                assert found[name] == [(1, {"n": 1}), (3, {"n": 2})]
            else:
                assert found[name] == [(2, {"n": "1"}), (4, {"n": "2\nx"})]


def test_other_line_separators_are_text(tmp_path):
    (tmp_path / "a.txt").write_text("one\u2028two\x0bthree\x85four\n", encoding="utf-8")
    assert [record.data["text"] for record in iterate_records(tmp_path / "a.txt")] == ["one\u2028two\x0bthree\x85four"]


def test_pipes_are_read_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text('{"n": 1}\n{"n": 2}\n'))
    writer.start()
    assert [record.data["n"] for record in iterate_records(pipe)] == [1, 2]
    writer.join()
