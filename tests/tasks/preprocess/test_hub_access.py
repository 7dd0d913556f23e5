"""Names that are no paths: the hub is asked once, with a time-out, and the answer says what was tried."""

import socket
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import hub_access
from mindspeed_llm.tasks.preprocess.command.hub import HubData
from mindspeed_llm.tasks.preprocess.hub_access import looks_like_path, prepare_hub
from mindspeed_llm.tasks.preprocess.tokenizers import TokenizerOptions, load_tokenizer, loading


@pytest.fixture
def deaf_hub(monkeypatch):
    """An endpoint that takes connections and never answers."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub_access, "TIMEOUT_S", 0.2)
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        yield


def test_paths_are_not_asked_for(monkeypatch):
    monkeypatch.setattr(loading, "prepare_hub", lambda name: pytest.fail("asked the hub"))
    for name in ("./x", "/x/y", "~/x", "a/b/c", "a/"):
        assert looks_like_path(name)
        with pytest.raises(UserError, match="does not exist"):
            load_tokenizer(TokenizerOptions(name_or_path=name))
    assert not any(map(looks_like_path, ("gpt2", "Qwen/Qwen3-8B")))


@pytest.mark.usefixtures("deaf_hub")
def test_a_hub_that_does_not_answer_is_asked_once(caplog):
    caplog.set_level("INFO", logger="mindspeed_llm")
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"no such directory, the cache of the hub .* cannot be reached \(.*[Tt]imeout"):
        load_tokenizer(TokenizerOptions(name_or_path="nobody/has-this-tokenizer"))
    with pytest.raises(UserError, match=r"--input nobody/has-this-data: .* is not asked: HF_HUB_OFFLINE is set"):
        list(HubData({"path": "nobody/has-this-data"}, cache_dir=None, streaming=False).records())
    # The libraries alone wait for 20 seconds and more.
    assert time.monotonic() - begin < 15
    assert caplog.text.count("asking the hub") == 1


@pytest.mark.usefixtures("deaf_hub")
def test_data_sets_of_a_hub_that_does_not_answer():
    with pytest.raises(UserError, match=r"--input nobody/has-this-data: .* cannot be reached"):
        list(HubData({"path": "nobody/has-this-data"}, cache_dir=None, streaming=False).records())


@pytest.mark.usefixtures("deaf_hub")
def test_builders_of_local_files_need_no_hub(tmp_path: Path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "a"}\n')
    data = HubData({"path": "json", "data_files": str(file)}, cache_dir=str(tmp_path / "cache"), streaming=False)
    assert [record.data for record in data.records()] == [{"text": "a"}]


def test_offline_is_said(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert prepare_hub("x") == "HF_HUB_OFFLINE is set"
