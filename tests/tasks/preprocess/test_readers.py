"""Every file type gives the same records; mistakes name the file and the line."""

import json
import logging

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import readers
from mindspeed_llm.tasks.preprocess.readers import data_files, iterate_records

ROWS = [{"text": "one", "n": "1"}, {"text": "zwei, drei\nvier", "n": "2"}, {"text": '五 🙂 "q"', "n": "3"}]


def _write(path, kind):
    if kind == "json":
        path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    elif kind == "csv":
        import csv

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
    monkeypatch.setattr(readers, "_CHUNK_CHARS", 7)
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
        ("a.jsonl", b'{"a": "b\n', r"not valid JSON \(Invalid control character at column 9\)"),
        ("a.jsonl", b'{"a" 1}\n', r"not valid JSON \(Expecting ':' delimiter at column 6\)"),
        ("a.txt", b"a\xff", r"a\.txt is not valid UTF-8 text \(byte 1: .*\); save it as UTF-8"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), r"a\.jsonl is not valid UTF-8 text, but UTF-16 .*; save it as UTF-8"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", r"a\.csv:3: the row has more fields"),
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


def test_folders(tmp_path, caplog):
    with pytest.raises(UserError, match="does not exist"):
        data_files(tmp_path / "none")
    with pytest.raises(UserError, match="holds no data files; expected files of type json, jsonl"):
        data_files(tmp_path)
    for name in ("b.jsonl", "a.jsonl", ".hidden"):
        (tmp_path / name).write_text('{"text": "' + name + '"}')
    assert [record.data["text"] for record in iterate_records(tmp_path)] == ["a.jsonl", "b.jsonl"]
    for name in ("README.md", ".gitattributes", "LICENSE", "data.jsonl.gz"):
        (tmp_path / name).write_text("x")
    (tmp_path / "more").mkdir()
    caplog.set_level(logging.INFO, "mindspeed_llm")
    for _ in range(2):
        assert [file.name for file in data_files(tmp_path)] == ["a.jsonl", "b.jsonl"]
    assert caplog.text.count("left out, since no data files: LICENSE, README.md, data.jsonl.gz, more/") == 1
    (tmp_path / "c.txt").write_text("x")
    with pytest.raises(UserError, match=r"mixes file types \(\.jsonl: 2, \.txt: 1\)"):
        data_files(tmp_path)
