"""Names and inline mappings resolve to files, columns and tags; mistakes name the nearest valid thing."""

import json
from pathlib import Path

import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.dataset_info import resolve_datasets
from mindspeed_llm.tasks.preprocess.records import SHAREGPT_TAGS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "info"
    home.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (home / name).write_text("{}")
    (tmp_path / "here.jsonl").write_text("{}")
    info = {
        "alpha": {"file_name": "a.jsonl", "columns": {"response": "answer"}},
        "beta": {"file_name": "b.jsonl", "formatting": "sharegpt", "tags": {"user_tag": "user"}, "num_samples": 5},
        "hub": {"hf_hub_url": "x/y"},
        "pairs": {"file_name": "a.jsonl", "ranking": True},
    }
    (home / "dataset_info.json").write_text(json.dumps(info))
    return home


@pytest.mark.parametrize("given", ["alpha, beta", ["alpha", "beta"], "alpha,beta"])
def test_several_names(folder, given):
    alpha, beta = resolve_datasets(given, folder)
    assert (alpha.name, alpha.files, beta.name, beta.num_samples) == ("alpha", [folder / "a.jsonl"], "beta", 5)


def test_given_keys_keep_the_defaults_of_the_others(folder):
    alpha, beta = resolve_datasets("alpha,beta", folder)
    assert (alpha.columns["prompt"], alpha.columns["response"]) == ("instruction", "answer")
    assert alpha.given_columns == ("response",)
    assert beta.tags == {**SHAREGPT_TAGS, "user_tag": "user"}


def test_inline_mapping(folder):
    (entry,) = resolve_datasets({"file_name": "here.jsonl", "columns": {"prompt": "q", "query": None}}, folder)
    assert entry.files == [Path("here.jsonl")]
    assert (entry.columns["prompt"], entry.columns["query"]) == ("q", None)
    (entry,) = resolve_datasets({"file_name": "a.jsonl"}, folder)
    assert entry.files == [folder / "a.jsonl"]
    entries = resolve_datasets({"file_name": ["here.jsonl", "a.jsonl"]}, folder)
    assert [entry.files for entry in entries] == [[Path("here.jsonl")], [folder / "a.jsonl"]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("alpa", r"data\.dataset: 'alpa' is not in .*dataset_info\.json; did you mean 'alpha'\?"),
        ("zzz", r"it has alpha, beta, hub, pairs"),
        ("hub", r"data set 'hub': loading from a hub is not available"),
        ("pairs", r"ranking is true"),
        ({"file_name": "none.jsonl"}, r"'none\.jsonl' does not exist; looked for .*info/none\.jsonl and none\.jsonl"),
        ({"filename": "a"}, r"^data\.dataset: unknown key 'filename'; did you mean 'file_name'\?"),
        ({"columns": {}}, r"it has no file_name"),
        (
            {"file_name": "here.jsonl", "columns": {"promt": "q"}},
            r"unknown key 'promt' in columns; did you mean 'prompt'",
        ),
        ({"file_name": "here.jsonl", "columns": {"chosen": "q"}}, r"belongs to preference data"),
        ({"file_name": "here.jsonl", "formatting": "alpacca"}, r"formatting 'alpacca'; expected one of alpaca"),
        ({"file_name": "here.jsonl", "num_samples": 0}, r"num_samples 0; expected a positive number"),
        ({"file_name": "here.jsonl", "split": "test"}, r"split 'test'"),
    ],
)
def test_mistakes(folder, given, message):
    with pytest.raises(UserError, match=message):
        resolve_datasets(given, folder)


def test_preference_pairs_where_they_are_allowed(folder):
    (entry,) = resolve_datasets("pairs", folder, preference=True)
    assert entry.ranking and (entry.columns["chosen"], entry.layout.formatting) == ("chosen", "alpaca")
    (entry,) = resolve_datasets("alpha", folder, preference=True)
    assert not entry.ranking
    keys = {"file_name": "here.jsonl", "ranking": True, "columns": {"chosen": "good", "rejected": "bad"}}
    (entry,) = resolve_datasets(keys, folder, preference=True)
    assert (entry.columns["chosen"], entry.columns["rejected"]) == ("good", "bad")
    with pytest.raises(UserError, match="column 'chosen' belongs to preference data, so ranking must be true"):
        resolve_datasets({**keys, "ranking": False}, folder, preference=True)
    with pytest.raises(UserError, match="column 'kto_tag': single replies marked good or bad are not supported"):
        resolve_datasets({"file_name": "here.jsonl", "columns": {"kto_tag": "k"}}, folder, preference=True)


def test_messages_name_the_settings_that_are_asked(folder, tmp_path):
    with pytest.raises(UserError, match=r"^--input names 'x', but .* does not exist; set --dataset-dir to the folder"):
        resolve_datasets("x", tmp_path, field="--input", dir_field="--dataset-dir")


def test_folder_without_info_file(tmp_path):
    with pytest.raises(UserError, match=r"dataset_info\.json does not exist; set data\.dataset_dir"):
        resolve_datasets("alpha", tmp_path)


def test_shipped_entries():
    folder = Path(__file__).resolve().parents[3] / "configs" / "fsdp2" / "data"
    info = json.loads((folder / "dataset_info.json").read_text())
    assert {"alpaca_full", "sharegpt4_zh", "distill_r1_110k_sft_mix"} <= set(info)
    # Their files are the user's to bring; the entries are sound when the missing file is all that is wrong.
    for name in info:
        with pytest.raises(UserError, match=r"does not exist; looked for"):
            resolve_datasets(name, folder)
