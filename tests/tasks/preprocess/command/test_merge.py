"""Parts become one set of files, equal to what one run would have written; parts that do not fit are refused."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.command.main import main
from mindspeed_llm.tasks.preprocess.command.merge import _COMMON, find_parts, merge
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader, IndexedWriter
from mindspeed_llm.tasks.preprocess.sample_store import read_summary, summary_file, write_summary
from tests.tasks.preprocess.command.toys import SFT, contents, preprocess, toys
from tests.tasks.preprocess.command.toys import summary as json_summary

__all__ = ["toys"]
SAMPLES = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11], [12, 13]]
KEYS = ["packed_input_ids_document", "packed_labels_document"]


def _write(prefix: Path, samples: Sequence[Sequence[int]], dtype: type = np.int32) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for sample in samples:
            writer.add(np.array(sample, dtype))
    return prefix


def _part(folder: Path, name: str, samples: Sequence[Sequence[int]], **summary: Any) -> None:
    for key in KEYS:
        _write(folder / f"{name}_{key}", samples)
    counts = {"num_records": len(samples), "num_samples": len(samples), "num_tokens": sum(map(len, samples))}
    skipped: Mapping[str, Any] = {"skipped": {"empty": 1}, "first_skipped": {"empty": [f"{name}.jsonl:7"]}}
    write_summary(
        folder / name, {"format": 1, "handler": "H", "tokenizer": {"identity": "t"}, **counts, **skipped, **summary}
    )


def test_equal_to_one_run_in_natural_order(tmp_path: Path) -> None:
    folder = tmp_path / "parts of it"
    for name, samples in (("part10", SAMPLES[4:]), ("part2", SAMPLES[2:4]), ("part1", SAMPLES[:2])):
        _part(folder, name, samples)
    # What only contains the key, or is a temporary file, is no part.
    _write(folder / "part3_packed_input_ids_document_old", [[99]])
    (folder / ".part1_packed_input_ids_document.bin.0123").touch()
    prefix = tmp_path / "new" / "all"
    lines = merge(folder, KEYS, prefix)
    assert lines[0] == "merged 3 parts: part1, part2, part10"
    for key in KEYS:
        whole = _write(tmp_path / "whole", SAMPLES)
        for suffix in (".bin", ".idx"):
            assert Path(f"{prefix}_{key}{suffix}").read_bytes() == Path(f"{whole}{suffix}").read_bytes()
    summary = read_summary(prefix)
    assert (summary.num_records, summary.num_tokens, summary.skipped) == (6, 13, {"empty": 3})
    assert summary.first_skipped == {"empty": ["part1.jsonl:7", "part2.jsonl:7", "part10.jsonl:7"]}
    assert sorted(path.name for path in prefix.parent.iterdir()) == sorted(
        [*(f"all_{key}{suffix}" for key in KEYS for suffix in (".bin", ".idx")), "all_summary.json"]
    )


def test_what_the_summary_of_the_whole_says(tmp_path: Path) -> None:
    common = {"kind": "instruction", "prompt_type": "qwen3"}
    _part(tmp_path, "a", SAMPLES, **common, tokenizer={"identity": "t", "path": "here"})
    _part(tmp_path, "b", SAMPLES, **common, tokenizer={"identity": "t", "path": "there"}, handler="Other")
    merge(tmp_path, KEYS, tmp_path / "all")
    content = json_summary(tmp_path, "all")
    assert content["kind"] == "instruction" and content["prompt_type"] == "qwen3"
    assert content["keys"] == ["input_ids", "labels"] and content["merged"] == [
        str(tmp_path / "a"),
        str(tmp_path / "b"),
    ]
    assert "handler" not in content and content["tokenizer"] == {"identity": "t", "path": "here"}


def test_the_output_among_the_parts_is_none(tmp_path: Path) -> None:
    for name, samples in (("a", SAMPLES[:2]), ("b", SAMPLES[2:])):
        _part(tmp_path, name, samples)
    for _ in range(2):
        merge(tmp_path, KEYS, tmp_path / "all")
        reader = IndexedReader(tmp_path / "all_packed_labels_document")
        assert [reader[i].tolist() for i in range(len(reader))] == SAMPLES
    # The summary's keys are those of samples, as --inspect wants them.
    assert '"input_ids",' in summary_file(tmp_path / "all").read_text()


def test_parts_without_a_summary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b", "c"):
        _write(tmp_path / f"{name}_text_document", SAMPLES)
    write_summary(tmp_path / "b", {"num_records": 6})
    with caplog.at_level(logging.WARNING):
        merge(tmp_path, ["text_document"], tmp_path / "all")
    assert "2 of 3 parts have no summary" in caplog.text
    assert len(IndexedReader(tmp_path / "all_text_document")) == 18


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    def fails(words: str, keys: Sequence[str] = KEYS, folder: Path = tmp_path) -> None:
        with pytest.raises(UserError) as error:
            merge(folder, keys, tmp_path / "all")
        assert words in str(error.value)
        assert not list(tmp_path.glob("all*"))

    fails("needs the folder that holds the parts", folder=tmp_path / "none")
    fails("holds no files <name>_packed_input_ids_document.bin/.idx")
    _part(tmp_path, "a", SAMPLES)
    fails("holds no files <name>_input.bin/.idx", keys=["input"])
    fails("holds no files <name>_text_document.bin/.idx", keys=["packed_labels_document", "text_document"])
    _part(tmp_path, "b", SAMPLES, tokenizer={"identity": "other"})
    fails(f"{tmp_path / 'a'} and {tmp_path / 'b'} cannot be read as one (tokenizer: t -> other)")
    _part(tmp_path, "b", SAMPLES, kind="pairwise")
    fails("cannot be read as one (kind: null -> pairwise)")
    _part(tmp_path, "b", SAMPLES)
    _write(tmp_path / f"b_{KEYS[1]}", SAMPLES[1:])
    fails("differ in samples (packed_input_ids_document: 6, packed_labels_document: 5)")
    _write(tmp_path / f"b_{KEYS[1]}", SAMPLES, np.uint16)
    fails("b_packed_labels_document holds uint16, but")
    (tmp_path / f"b_{KEYS[1]}.bin").write_bytes(b"1")
    fails("b_packed_labels_document.bin is damaged")
    (tmp_path / f"b_{KEYS[1]}.bin").unlink()
    fails("b_packed_labels_document.idx has no .bin beside it")
    (tmp_path / f"b_{KEYS[1]}.idx").unlink()
    fails("part b has packed_input_ids_document, but no packed_labels_document")


def test_names_with_numbers(tmp_path: Path) -> None:
    names = ["x", "x1", "x1a", "x2", "x10", "x10_2", "x10_11", "y"]
    for name in reversed(names):
        _write(tmp_path / f"{name}_text_document", [[1]])
    found = find_parts(tmp_path, ["text_document"], tmp_path / "z")["text_document"]
    assert [path.name.removesuffix("_text_document") for path in found] == names


@pytest.mark.parametrize("options", [SFT, []], ids=["instructions", "text"])
def test_runs_over_parts_merge_to_one_run(toys: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    whole = (toys / ("alpaca.jsonl" if options else "text.jsonl")).read_text(encoding="utf-8").splitlines(keepends=True)
    for number, lines in enumerate((whole[:13], whole[13:40], whole[40:]), start=1):
        (toys / f"in{number}.jsonl").write_text("".join(lines), encoding="utf-8")
        preprocess(*options, source=f"in{number}.jsonl", prefix=f"parts/part{number}")
    (toys / "all.jsonl").write_text("".join(whole), encoding="utf-8")
    preprocess(*options, source="all.jsonl")
    keys = [*KEYS, "packed_attention_mask_document"] if options else ["text_document"]
    argv = ["--input", "parts", "--output-prefix", "out/merged", "--merge-group-keys", *keys]
    capsys.readouterr()
    main([*argv, "--check"])
    assert "part1_" in capsys.readouterr().out and not (toys / "out" / "merged_summary.json").exists()
    main(argv)
    assert "merged 3 parts: part1, part2, part3" in capsys.readouterr().out
    assert contents(toys / "out", "merged") == contents(toys / "out")
    found, expected = json_summary(toys / "out", "merged"), json_summary(toys / "out")
    same = [*_COMMON, "tokenizer", "num_records", "num_tokens", "num_targets", "length_histogram"]
    assert {name: found[name] for name in same} == {name: expected[name] for name in same}
    assert len(found["inputs"]) == 3
    # And it can be looked at.
    main(["--inspect", "out/merged", "--num", "1"])
    assert ("Say number 0." if options else "ocument 0: ") in capsys.readouterr().out
