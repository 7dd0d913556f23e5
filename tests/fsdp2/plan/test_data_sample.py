"""`--check` looks at the first records of training and evaluation data as the run will."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.fsdp2.plan.data_sample import sample_data
from tests.fsdp2.data.helpers import build, make_config, write_jsonl
from tests.support.tokenizers import byte_tokenizer

ALPACA = {"instruction": "q", "output": "a"}
LF = {"template": "empty"}, {}
PT = {}, {"stage": "pt"}
MG = {"data_manager_type": "mg"}, {"stage": "pt"}


def _files(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    good = {**ALPACA, "text": "some text"}
    return {
        "dataset": {"file_name": write_jsonl(folder / "a.jsonl", [good] * 3)},
        "eval_dataset": {"file_name": write_jsonl(folder / "b.jsonl", [good, row])},
    }


@pytest.mark.parametrize(("data", "training"), [LF, PT, MG])
def test_evaluation_data_is_looked_at(tmp_path: Path, data: dict[str, Any], training: dict[str, Any]) -> None:
    files = _files(tmp_path, {**ALPACA, "text": "more"})
    found = sample_data(make_config(tmp_path, {**files, **data}, **training), byte_tokenizer())
    assert [(sample.name, sample.records) for sample in found] == [
        (str(tmp_path / "a.jsonl"), 3),
        (f"{tmp_path / 'b.jsonl'} (evaluation)", 2),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "q", "output": 1, "text": 1}, r"expected text, found int"),
        ({"instruction": "\ud800", "output": "a", "text": "\ud800"}, r"half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize(("data", "training"), [LF, PT, MG])
def test_its_mistakes_name_field_file_and_line(
    tmp_path: Path, data: dict[str, Any], training: dict[str, Any], row: dict[str, Any], message: str
) -> None:
    files = _files(tmp_path, {})
    # Written with escapes, as a file holds half a pair.
    Path(files["eval_dataset"]["file_name"]).write_text(json.dumps(row))
    with pytest.raises(UserError, match=rf"^data\.eval_dataset: .*b\.jsonl:1: key '\w+': .*{message}"):
        sample_data(make_config(tmp_path, {**files, **data}, **training), byte_tokenizer())


def test_no_usable_record_names_the_field(tmp_path: Path) -> None:
    files = _files(tmp_path, ALPACA)
    write_jsonl(tmp_path / "b.jsonl", [{"instruction": "", "output": "a"}])
    with pytest.raises(UserError, match=r"^data\.eval_dataset: none of the first 1 records of .*empty prompt"):
        sample_data(make_config(tmp_path, {**files, "template": "empty"}), byte_tokenizer())


def test_empty_replies_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = _files(tmp_path, {"instruction": "q", "output": ""})
    sample_data(make_config(tmp_path, {**files, "template": "default"}), byte_tokenizer())
    assert "b.jsonl: 1 records have an empty reply" in caplog.text


def test_kept_data_of_other_settings_is_refused(tmp_path: Path) -> None:
    data = {**_files(tmp_path, ALPACA), "template": "empty", "tokenized_path": str(tmp_path / "kept")}
    build(make_config(tmp_path, data), byte_tokenizer())
    assert sample_data(make_config(tmp_path, data), byte_tokenizer()) == []
    with pytest.raises(UserError, match=r"made with other settings: data\.cutoff_len"):
        sample_data(make_config(tmp_path, {**data, "cutoff_len": 7}), byte_tokenizer())
