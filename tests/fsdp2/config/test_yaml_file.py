"""Reading YAML: which scalars are what, and one clear message for each kind of broken file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.config.yaml_file import dump_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1e-05", 1e-5),
        ("1.e-5", 1e-5),
        ("1E+3", 1000.0),
        (".5", 0.5),
        ("-0.25", -0.25),
        ("5.", 5.0),
        ("1_000", 1000),
        ("0x10", 16),
        ("-1", -1),
        ("0", 0),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("true", True),
        ("False", False),
        ("TRUE", True),
        ("yes", "yes"),
        ("on", "on"),
        ("null", None),
        ("~", None),
        ("", None),
        ("None", "None"),
        ("'null'", "null"),
        ("'1e-5'", "1e-5"),
        ("100,0,0", "100,0,0"),
        ("[1, 2]", [1, 2]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)
def test_plain_scalars(write_yaml: Callable[[str], Path], text: str, value: object) -> None:
    found = read_yaml(write_yaml(f"model:\n  key: {text}\n")).values["model"]["key"]
    assert found == value
    assert type(found) is type(value)


def test_lines_are_those_of_the_file(write_yaml: Callable[[str], Path]) -> None:
    path = write_yaml("# comment\nmodel:\n\n  a: 1\n  b: 2\ndata: {c: 3}\n")
    found = read_yaml(path)
    assert found.where("model") == f"{path}, line 2"
    assert found.where("model", "b") == f"{path}, line 5"
    assert found.where("data", "c") == f"{path}, line 6"


def test_a_section_without_content_is_empty(write_yaml: Callable[[str], Path]) -> None:
    assert read_yaml(write_yaml("model:\n  # a: 1\ndata: {}\n")).values == {"model": {}, "data": {}}


def test_anchors_and_merges_work(write_yaml: Callable[[str], Path]) -> None:
    content = "model: &base {a: 1, b: 2}\ndata:\n  <<: *base\n  b: 3\n  c: &list [x]\n  d: *list\n"
    assert read_yaml(write_yaml(content)).values["data"] == {"a": 1, "b": 3, "c": ["x"], "d": ["x"]}


def test_a_list_that_holds_itself_is_read(write_yaml: Callable[[str], Path]) -> None:
    value = read_yaml(write_yaml("model:\n  a: &x [*x]\n")).values["model"]["a"]
    assert value[0] is value


def test_byte_order_mark_is_no_part_of_the_first_key(write_yaml: Callable[[bytes], Path]) -> None:
    assert read_yaml(write_yaml(b"\xef\xbb\xbfmodel: {a: 1}\n")).values == {"model": {"a": 1}}


@pytest.mark.parametrize(
    "text", ["1e5", "1:30", "yes", "no", "null", "~", "", "010", "2024-01-01", "true", "<<", "a: b", "中"]
)
def test_dumped_texts_are_read_back_as_texts(write_yaml: Callable[[str], Path], text: str) -> None:
    dumped = dump_yaml({"model": {"key": text}})
    assert read_yaml(write_yaml(dumped)).values == {"model": {"key": text}}
    # Whoever reads the file with the plain library gets the same.
    assert yaml.safe_load(dumped) == {"model": {"key": text}}


def test_the_loader_leaves_the_yaml_library_as_it_was() -> None:
    assert yaml.safe_load("yes") is True
    assert yaml.safe_load("1e-5") == "1e-5"


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["is empty"]),
        ("# only a comment\n", ["is empty"]),
        ("- a\n- b\n", ["line 1", "holds a list", "sections"]),
        ("just words\n", ["line 1", "holds a text"]),
        ("model:\n  a: 1\ndata: 5\n", ["line 3", "section 'data'", "holds a number"]),
        ("model:\n  - a\n", ["line 1", "section 'model'", "holds a list"]),
        ("model:\n  a: 1\n  b: 2\n  a: 3\n", ["line 4", "'a' stands twice", "line 2"]),
        ("model: {a: 1}\ndata: {}\nmodel: {b: 2}\n", ["line 3", "'model' stands twice", "line 1"]),
        ("data:\n  dataset:\n    x: 1\n    x: 1\n", ["line 4", "'x' stands twice"]),
        ("data:\n  d: [{y: 1, y: 2}]\n", ["line 2", "'y' stands twice"]),
        ("model:\n  a: [1, 2\n", ["line 3", "not valid YAML"]),
        ("model:\n\ta: 1\n", ["line 2", "not valid YAML"]),
        ("model:\n  a: b: c\n", ["line 2", "not valid YAML"]),
        ("model:\n  a: *unknown\n", ["line 2", "unknown", "not valid YAML"]),
        ("model: &x {a: 1}\nb: *x\n? &y [*y]\n: 1\n", ["not valid YAML"]),
        ("model: {a: 1}\n---\ndata: {}\n", ["line 2", "not valid YAML"]),
        ("model:\n  a: !!python/object/apply:os.getcwd []\n", ["line 2", "not valid YAML"]),
        ("model:\n  ? [a, b]\n  : 1\n", ["not valid YAML"]),
        (b"model:\n  a: \xff\xfe\n", ["no UTF-8 text", "byte 13"]),
        (b"model:\n  a: \x00\n", ["not valid YAML"]),
    ],
)
def test_broken_files_get_one_clear_message(
    write_yaml: Callable[[str | bytes], Path], content: str | bytes, parts: list[str]
) -> None:
    path = write_yaml(content)
    with pytest.raises(UserError) as error:
        read_yaml(path)
    message = str(error.value)
    assert message.startswith(str(path))
    assert [part for part in parts if part not in message] == []
    assert "\n" not in message


def test_missing_file_names_near_files(tmp_path: Path) -> None:
    for name in ("pretrain_qwen3_1point7b_4k_fsdp2_A2.yaml", "tune_other.yaml", "notes.txt"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"does not exist; its folder holds pretrain_qwen3_1point7b_4k_fsdp2_A2\.yaml"):
        read_yaml(tmp_path / "pretrain_qwen3_1p7b_4k_fsdp2_A2.yaml")


def test_missing_file_in_a_folder_without_yaml(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no YAML file"):
        read_yaml(tmp_path / "a.yaml")


def test_missing_folder_and_folder_as_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"does not exist; the folder .*nowhere does not exist either"):
        read_yaml(tmp_path / "nowhere" / "a.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(UserError, match=r"folder\.yaml is a folder"):
        read_yaml(tmp_path / "folder.yaml")
