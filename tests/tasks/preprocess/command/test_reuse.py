"""A second run uses what is there, and makes it anew, saying why, when anything that decides it has changed."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from mindspeed_llm.tasks.preprocess.command import identity
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedWriter
from mindspeed_llm.tasks.preprocess.sample_store import read_summary, write_summary
from tests.tasks.preprocess.command.toys import RECORDS, SFT, contents, preprocess, summary, toys, write_jsonl

__all__ = ["toys"]
DONE, UP_TO_DATE, REPLACING = (
    ": done in ",
    ": up to date",
    ": making the output anew, the earlier one stays until then: ",
)


def _said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_the_same_again(toys: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    preprocess(*SFT)
    first, before = _said(capsys), _stamps(toys / "out")
    assert DONE in first and REPLACING not in first
    # Neither is the input read for its hash, nor does it matter how the work is shared out.
    monkeypatch.setattr(identity, "_read", lambda path: pytest.fail("read again"))
    for argv in ([], ["--workers", "2"], ["--n-subs", "3"], ["--log-interval", "7"], ["--map-keys", "{}"]):
        preprocess(*SFT, *argv)
        again = _said(capsys)
        assert UP_TO_DATE in again and DONE not in again
        # The table is the one of the first run.
        assert again.splitlines()[1:] == first.splitlines()[1:]
        assert _stamps(toys / "out") == before
    preprocess(*SFT, "--overwrite-cache")
    assert REPLACING + "--overwrite-cache" in _said(capsys)
    after = _stamps(toys / "out")
    assert all(after[name] != before[name] for name in before)


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--seq-length", "100"], "seq_length: null -> 100"),
        (["--prompt-type", "chatml"], "prompt_type: qwen3 -> chatml; "),
        (["--enable-thinking", "true"], "enable_thinking: none -> true"),
        (["--max-samples", "10"], "max_samples: null -> 10"),
        (["--map-keys", '{"query": ""}'], 'columns: {} -> {"query": null}'),
        (["--pack", "--seq-length", "99"], "pack: false -> true"),
        (["--append-eod"], "append_eod: false -> true"),
        (["--on-bad-record", "skip"], "on_bad_record: error -> skip"),
        (["--tokenizer-name-or-path", "other"], "tokenizer: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_options(toys: Path, capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    shutil.copytree(toys / "tok", toys / "other")
    file = toys / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = dict(
        zip(content["model"]["vocab"], reversed(content["model"]["vocab"].values()), strict=True)
    )
    file.write_text(json.dumps(content))
    preprocess(*SFT)
    preprocess(*SFT, *argv, prefix="out/fresh")
    _said(capsys)
    preprocess(*SFT, *argv)
    said = _said(capsys)
    assert REPLACING + "it was made with other options (" in said and words in said and DONE in said
    assert contents(toys / "out") == contents(toys / "out", "fresh")


def test_a_template_file_whose_content_changes(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = toys / "templates.json"
    entry = {"name": "mine", "format_user": {"slots": ["Q: {{content}}\nA: "]}}
    argv = ["--handler-name", "AlpacaStyleInstructionHandler", "--prompt-type", "mine", "--prompt-type-path", str(file)]
    file.write_text(json.dumps([entry]))
    preprocess(*argv)
    entry["format_user"]["slots"] = ["Question: {{content}}\nA: "]  # type: ignore[index]
    file.write_text(json.dumps([entry]))
    from mindspeed_llm.tasks.preprocess import templates

    templates._entries.cache_clear()  # as in a process of its own
    _said(capsys)
    preprocess(*argv)
    assert "it was made with other options (template: " in _said(capsys)


def test_other_inputs(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = toys / "in"
    folder.mkdir()
    for number, name in enumerate("ab"):
        write_jsonl(folder / f"{name}.jsonl", RECORDS[number * 10 : number * 10 + 10])

    def again() -> str:
        preprocess(*SFT, source="in")
        return _said(capsys)

    again()
    (folder / "b.jsonl").touch()
    shutil.copytree(folder, toys / "moved")
    assert UP_TO_DATE in again()
    preprocess(*SFT, source="moved")
    assert UP_TO_DATE in _said(capsys)
    write_jsonl(folder / "b.jsonl", RECORDS[30:40])
    assert f"it was made from other inputs ({folder / 'b.jsonl'} has changed)" in again()
    (folder / "b.jsonl").rename(folder / "c.jsonl")
    assert UP_TO_DATE in again()
    (folder / "c.jsonl").rename(folder / "0.jsonl")
    assert "0.jsonl is new" in again()
    (folder / "0.jsonl").unlink()
    assert "0.jsonl is not read any more" in again()
    preprocess(*SFT, source="in/a.jsonl", prefix="out/fresh")
    assert contents(toys / "out") == contents(toys / "out", "fresh")


def test_a_changed_input_of_the_same_size_and_time_is_noticed(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_jsonl(toys / "in.jsonl", RECORDS[:9])
    (toys / "other.jsonl").write_bytes(file.read_bytes().replace(b"Say", b"Ask"))
    shutil.copystat(file, toys / "other.jsonl")

    def again(*argv: str) -> str:
        preprocess(*SFT, *argv, source="in.jsonl")
        return _said(capsys)

    def rewrite() -> None:
        before = file.stat()
        file.write_bytes(file.read_bytes().replace(b"number", b"NUMBER"))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))

    again()
    for change in (lambda: shutil.copy2("other.jsonl", file), rewrite):
        change()
        said = again()
        assert f"{file} has changed" in said and DONE in said
        preprocess(*SFT, source="in.jsonl", prefix="out/fresh")
        assert contents(toys / "out") == contents(toys / "out", "fresh")
        capsys.readouterr()
        assert UP_TO_DATE in again()
    again("--streaming")
    assert UP_TO_DATE in again("--streaming")
    os.replace(shutil.copy2(file, toys / "copy.jsonl"), file)
    assert UP_TO_DATE in again()


def test_output_that_was_written_to_since(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess(*SFT)
    expected = contents(toys / "out")
    for key in ("input_ids", "labels", "attention_mask"):
        for suffix, place in ((".bin", 0), (".bin", -1), (".bin", None), (".idx", -1)):
            file = toys / "out" / f"data_packed_{key}_document{suffix}"
            content, before = bytearray(file.read_bytes()), file.stat()
            content[len(content) // 2 if place is None else place] ^= 1
            file.write_bytes(content)
            if place is not None:
                os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
            _said(capsys)
            preprocess(*SFT)
            assert f"files of it are missing or damaged ({file.name})" in _said(capsys)
            assert contents(toys / "out") == expected
    for file in (toys / "out").iterdir():
        file.touch()
    preprocess(*SFT)
    assert UP_TO_DATE in _said(capsys)


def test_damaged_output(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess(*SFT)
    expected, index = contents(toys / "out"), toys / "out" / "data_packed_labels_document.idx"
    for damage in (index.unlink, lambda: os.truncate(index, 100), (toys / "out" / "data_summary.json").unlink):
        damage()
        _said(capsys)
        preprocess(*SFT)
        said = _said(capsys)
        assert "files of it are missing or damaged (data_packed_labels_document.idx)" in said or (
            "nothing says what it was made from" in said
        )
        assert contents(toys / "out") == expected


def test_output_of_another_program_is_replaced_with_a_line(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedWriter(toys / "out" / "data_text_document") as writer:
        writer.add(np.array([1, 2]))
    for content in (None, {"num_records": 1}, {"options": "?"}):
        if content is not None:
            write_summary(toys / "out" / "data", content)
        preprocess(source="text.jsonl")
        assert DONE in _said(capsys)
        assert len(contents(toys / "out")["_text_document.bin"]) > 100


def test_another_handler_leaves_no_keys_of_the_one_before(toys: Path) -> None:
    """Whoever reads all files of a prefix must not find those of two kinds; text beside samples is told apart."""
    preprocess(source="text.jsonl")
    preprocess(*SFT)
    assert "_text_document.bin" in contents(toys / "out")
    write_jsonl(toys / "pairs.jsonl", [{"instruction": "q", "chosen": "a", "rejected": "b"}])
    preprocess("--handler-name", "AlpacaStylePairwiseHandler", "--prompt-type", "qwen3", source="pairs.jsonl")
    names = {name for name in contents(toys / "out") if name.endswith(".bin")}
    sides = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
    assert names == {"_text_document.bin", *(f"_packed_{key}_document.bin" for key in sides)}


def test_the_summary_is_one_that_the_trainers_read(toys: Path) -> None:
    preprocess(*SFT, "--seq-length", "80")
    counts, content = read_summary("out/data"), summary(toys / "out")
    assert (counts.num_records, counts.num_samples, counts.skipped) == (
        content["num_records"], content["num_samples"], content["skipped"],
    )  # fmt: skip
    assert counts.num_records == 60 and counts.num_tokens == content["num_tokens"] > 0
