"""Checks of data files before a tokenizer, torch or weights are loaded."""

import json
import subprocess
import sys

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.data.validate import validate_data
from tests.fsdp2.data.helpers import make_config, write_jsonl

ALPACA = {"instruction": "q", "output": "a"}


def _check(folder, data, **training):
    validate_data(make_config(folder, data, **training))


def test_sound_data_passes(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [ALPACA])
    _check(tmp_path, {"dataset": {"file_name": file}, "template": "qwen3", "eval_dataset": {"file_name": file}})
    text = write_jsonl(tmp_path / "t.jsonl", [{"text": "a"}])
    _check(tmp_path, {"dataset": {"file_name": text}}, stage="pt")
    _check(tmp_path, {"dataset": {"file_name": text}, "data_manager_type": "mg"}, stage="pt")
    (tmp_path / "folder").mkdir()
    for name, content in (("a.jsonl", ""), ("b.jsonl", json.dumps(ALPACA)), ("README.md", "x")):
        (tmp_path / "folder" / name).write_text(content)
    _check(tmp_path, {"dataset": {"file_name": "folder"}})


@pytest.mark.parametrize(
    ("data", "stage", "message"),
    [
        ({"dataset": {"file_name": "none.json"}}, "sft", r"data\.dataset: data set file 'none\.json' does not exist"),
        ({"dataset": {"file_name": "empty.jsonl"}}, "sft", r"empty\.jsonl holds no records"),
        ({"dataset": {"file_name": "t.jsonl"}}, "sft", r"t\.jsonl:1: the record has no key 'instruction'"),
        ({"dataset": {"file_name": "a.jsonl"}}, "pt", r"a\.jsonl:1: the record has no key 'text'"),
        (
            {"dataset": {"file_name": "a.jsonl", "columns": {"system": "sys"}}},
            "sft",
            r"a\.jsonl:1: the record has no key 'sys' \(the system column\)",
        ),
        ({"dataset": {"file_name": "n.jsonl"}}, "sft", r"n\.jsonl:1: key 'output': expected text, found int 3"),
        ({"dataset": "nam"}, "sft", r"data\.dataset: 'nam' is not in .*; did you mean 'name'\?"),
        ({"dataset": "name", "eval_dataset": "x"}, "sft", r"data\.(eval_)?dataset: .*'x' is not in"),
        ({"dataset": "name", "template": "qwen4"}, "sft", r"data\.template: 'qwen4' is not a template; did you mean"),
        ({"dataset": "name", "tool_format": "x"}, "sft", r"data\.tool_format: 'x'"),
        (
            {"dataset": {"filename": "a.jsonl"}},
            "sft",
            r"data\.dataset: unknown key 'filename'; did you mean 'file_name'",
        ),
        ({"dataset": "name", "eval_dataset": {"filename": "a"}}, "sft", r"data\.eval_dataset: unknown key 'filename'"),
        (
            {"dataset": {"file_name": "empties"}},
            "sft",
            r"data\.dataset: none of the 2 data files in .*empties holds a record",
        ),
        ({"dataset": {"file_name": "mixed"}}, "sft", r"mixes file types"),
        ({"dataset": {"file_name": "bad"}, "data_manager_type": "mg"}, "pt", r"bad\.idx is damaged"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, data, stage, message):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [ALPACA])
    write_jsonl(tmp_path / "t.jsonl", [{"text": "a"}])
    write_jsonl(tmp_path / "n.jsonl", [{"instruction": "q", "output": 3}])
    write_jsonl(tmp_path / "empty.jsonl", [])
    (tmp_path / "mixed").mkdir()
    for name in ("a.txt", "b.csv"):
        (tmp_path / "mixed" / name).write_text("x")
    (tmp_path / "empties").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "empties" / name).touch()
    for name in ("bad.bin", "bad.idx"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "dataset_info.json").write_text(json.dumps({"name": {"file_name": "a.jsonl"}}))
    with pytest.raises(UserError, match=message):
        _check(tmp_path, data, stage=stage)


def test_neither_torch_nor_transformers_is_imported(tmp_path, repository):
    file = write_jsonl(tmp_path / "a.jsonl", [ALPACA])
    program = (
        "import sys\n"
        "from types import SimpleNamespace as N\n"
        "from mindspeed_llm.fsdp2.data.validate import validate_data\n"
        "from mindspeed_llm.fsdp2.config.data_config import DataConfig\n"
        f"validate_data(N(data=DataConfig(dataset={{'file_name': {file!r}}}), training=N(stage='sft')))\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
