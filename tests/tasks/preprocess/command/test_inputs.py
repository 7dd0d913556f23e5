"""Where records come from: files of all types, folders, pipes, and the datasets library."""

import gzip
import json
import logging
import os
import threading
from pathlib import Path

import pytest
from datasets import Dataset

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command import hub
from mindspeed_llm.tasks.preprocess.command.arguments import Arguments
from mindspeed_llm.tasks.preprocess.command.identity import identify
from mindspeed_llm.tasks.preprocess.command.inputs import resolve_inputs
from mindspeed_llm.tasks.preprocess.handlers import find_handler
from tests.tasks.preprocess.command.toys import TEXTS, contents, preprocess, summary, toys

__all__ = ["toys"]


def _as_types(folder: Path) -> list[Path]:
    """TEXTS as a file of every type that can hold them."""
    rows = [{"text": text} for text in TEXTS]
    data = Dataset.from_list(rows)
    files = [folder / f"t.{suffix}" for suffix in ("json", "parquet", "csv", "txt")]
    files[0].write_text(json.dumps(rows, indent=1), encoding="utf-8")
    data.to_parquet(files[1])
    data.to_csv(files[2])
    files[3].write_text("\n".join(TEXTS), encoding="utf-8")
    data.save_to_disk(str(folder / "saved"))
    with gzip.open(folder / "t.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    # A folder of the datasets library has descriptions beside the data.
    assert (folder / "saved" / "dataset_info.json").is_file() and (folder / "saved" / "state.json").is_file()
    return [*files, next((folder / "saved").glob("*.arrow")), folder / "saved", folder / "t.jsonl.gz"]


def test_every_type_gives_the_same(toys: Path) -> None:
    preprocess(source="text.jsonl")
    for number, file in enumerate(_as_types(toys)):
        preprocess("--n-subs", "3", source=str(file), prefix=f"out/d{number}")
        assert contents(toys / "out", f"d{number}") == contents(toys / "out")


def test_estimates(toys: Path) -> None:
    handler = find_handler("")
    for file in [toys / "text.jsonl", *_as_types(toys)]:
        inputs = resolve_inputs(Arguments(input=str(file)), handler)
        estimate = inputs.estimate(identify(inputs.files()))
        assert estimate is not None and abs(estimate - 60) <= 1
        limited = resolve_inputs(Arguments(input=str(file), max_samples=7), handler)
        assert limited.estimate(identify(limited.files())) == 7
        stream = resolve_inputs(Arguments(input=str(file), streaming=True), handler)
        assert stream.estimate(identify(stream.files(), read=False)) is None
    # Where only some records are looked at, the order of magnitude is right.
    for name, open_file in (("big.json", open), ("big.jsonl.gz", gzip.open)):
        with open_file(toys / name, "wt", encoding="utf-8") as stream:
            texts = ["ab cd " * (i % 50) + str(i * 7919) for i in range(3000)]
            rows = [json.dumps({"text": text}) for text in texts]
            stream.write("[" + ",".join(rows) + "]" if name.endswith("json") else "\n".join(rows))
        inputs = resolve_inputs(Arguments(input=str(toys / name)), handler)
        estimate = inputs.estimate(identify(inputs.files()))
        assert estimate is not None and 300 < estimate < 9000


def test_a_folder_that_also_holds_earlier_output(toys: Path) -> None:
    folder = toys / "in"
    folder.mkdir()
    for name, part in (("b.json", TEXTS[:20]), ("a.json", TEXTS[20:])):
        (folder / name).write_text(json.dumps([{"text": text} for text in part]))
    preprocess(source="in", prefix="in/data")
    preprocess("--overwrite-cache", source="in", prefix="in/data")
    assert summary(folder)["num_records"] == 60
    assert [Path(item["path"]).name for item in summary(folder)["inputs"]] == ["a.json", "b.json"]


def _fed(path: Path, content: bytes) -> threading.Thread:
    os.mkfifo(path)
    thread = threading.Thread(target=lambda: path.write_bytes(content))
    thread.start()
    return thread


def test_pipes(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess(source="text.jsonl")
    content = (toys / "text.jsonl").read_bytes()
    os.mkfifo(toys / "unused.jsonl")
    with pytest.raises(UserError, match=r"unused\.jsonl is a pipe, which can be read only once; add --streaming"):
        preprocess(source="unused.jsonl")
    for number, name in enumerate(("pipe.jsonl", "pipe")):
        for _ in range(2):
            (toys / name).unlink(missing_ok=True)
            thread = _fed(toys / name, content)
            preprocess("--streaming", source=name, prefix=f"out/p{number}")
            thread.join()
        assert contents(toys / "out", f"p{number}") == contents(toys / "out")
        assert summary(toys / "out", f"p{number}")["inputs"] == []
    said = capsys.readouterr().out
    assert said.count("it was made from another pass over a stream") == 2 and "up to date" not in said


def test_streaming_of_files(toys: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    preprocess(source="text.jsonl")
    from mindspeed_llm.tasks.preprocess.command import identity

    with monkeypatch.context() as patch:
        patch.setattr(identity, "_read", lambda path: pytest.fail("the input was read for its hash"))
        preprocess("--streaming", source="text.jsonl", prefix="out/stream")
        assert contents(toys / "out", "stream") == contents(toys / "out")
        capsys.readouterr()
        preprocess("--streaming", source="text.jsonl", prefix="out/stream")
        assert "up to date" in capsys.readouterr().out
    with (toys / "text.jsonl").open("a") as stream:
        stream.write('{"text": "more"}\n')
    preprocess("--streaming", source="text.jsonl", prefix="out/stream")
    assert "has changed" in capsys.readouterr().out and summary(toys / "out", "stream")["num_records"] == 61
    with pytest.raises(UserError, match="--n-subs 2 needs the number of records, which --streaming does not count"):
        preprocess("--streaming", "--n-subs", "2", source="text.jsonl")


@pytest.mark.parametrize("streaming", [[], ["--streaming"]], ids=["loaded", "streamed"])
def test_the_datasets_library(toys: Path, capsys: pytest.CaptureFixture[str], streaming: list[str]) -> None:
    preprocess(source="text.jsonl")
    params = {"path": "json", "data_files": {"train": str(toys / "text.jsonl")}}
    (toys / "params.json").write_text(json.dumps(params))
    argv = ["--hf-datasets-params", "params.json", "--cache-dir", str(toys / "cache"), *streaming]
    for _ in range(2):
        preprocess(*argv, source="any", prefix="out/hub")
    assert contents(toys / "out", "hub") == contents(toys / "out")
    assert ("up to date" in capsys.readouterr().out) == (not streaming)
    if not streaming:
        preprocess(*argv, "--n-subs", "4", "--max-samples", "9", source="any", prefix="out/nine")
        assert summary(toys / "out", "nine")["num_records"] == 9
    (toys / "params.json").write_text(json.dumps({**params, "split": "test"}))
    with pytest.raises(UserError, match=r"--input json: there is no such file .*could not load.*\(ValueError: .*test"):
        preprocess(*argv, source="any")
    (toys / "params.json").write_text(json.dumps({**params, "trust_remote_code": True}))
    with pytest.raises(UserError, match="'trust_remote_code' is not available; expected some of path, name"):
        preprocess(*argv, source="any")


def test_errors_in_a_stream_name_the_row(toys: Path) -> None:
    Dataset.from_list([{"text": "a"}, {"text": None}]).to_parquet(toys / "null.parquet")
    (toys / "params.json").write_text(json.dumps({"path": "parquet", "data_files": str(toys / "null.parquet")}))
    with pytest.raises(UserError, match=r"parquet:2: key 'text': expected text, found null"):
        preprocess("--hf-datasets-params", "params.json", "--cache-dir", str(toys / "cache"), source="x")


@pytest.mark.parametrize(
    "name, words",
    [
        ("./nothing", r"--input \./nothing does not exist$"),
        ("texx.jsonl", r"texx\.jsonl does not exist; did you mean text\.jsonl\?"),
        ("/a/b/c/d", "does not exist"),
        ("~/data.jsonl", r"write \$HOME"),
        ("script.py", "loading scripts are programs"),
    ],
)
def test_missing_files_are_not_looked_for_on_the_hub(toys: Path, name: str, words: str) -> None:
    (toys / "script.py").touch()
    with pytest.raises(UserError, match=words):
        preprocess(source=name)


def test_a_name_that_is_neither_file_nor_data_set(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def no_net(**params: object) -> None:
        raise ConnectionError(f"Couldn't reach '{params['path']}' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", no_net)
    monkeypatch.setattr(hub, "prepare_hub", lambda name: None)
    with pytest.raises(UserError, match=r"--input some/set: there is no such file or folder, and .*Couldn't reach"):
        preprocess(source="some/set")


def test_mixed_types_are_listed(toys: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = toys / "in"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.csv"):
        (folder / name).write_text('{"text": "x"}\n')
    with caplog.at_level(logging.INFO), pytest.raises(UserError, match=r"mixes file types \(\.csv: 1, \.jsonl: 2\)"):
        preprocess(source="in")


def test_empty_files_among_others(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = toys / "in"
    folder.mkdir()
    for name, content in (("a.jsonl", ""), ("b.jsonl", '{"text": "x"}'), ("c.jsonl", "")):
        (folder / name).write_text(content)
    preprocess(source="in")
    shown = capsys.readouterr().out
    assert [f"{folder / name}.jsonl is empty" in shown for name in "abc"] == [True, False, True]
    assert summary(toys / "out")["num_records"] == 1
