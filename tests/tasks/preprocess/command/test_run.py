"""Whole runs at toy size: what they write, whatever the number of processes and parts."""

import json
from pathlib import Path

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import engine
from mindspeed_llm.tasks.preprocess.command import run as run_module
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from tests.support.tokenizers import byte_tokenizer
from tests.tasks.preprocess.command.toys import (
    RECORDS,
    SFT,
    TEXTS,
    contents,
    preprocess,
    started,
    summary,
    toys,
    write_jsonl,
)

__all__ = ["toys"]


def test_pretraining_text(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess("--append-eod", source="text.jsonl")
    assert sorted(path.name for path in (toys / "out").iterdir()) == [
        "data_summary.json", "data_text_document.bin", "data_text_document.idx",
    ]  # fmt: skip
    reader, tokenizer = IndexedReader("out/data_text_document"), byte_tokenizer()
    assert [tokenizer.decode(reader[i]) for i in range(len(reader))] == [f"{text}</s>" for text in TEXTS]
    content = summary(toys / "out")
    tokens = sum(len(text.encode()) + 1 for text in TEXTS)
    assert (content["num_records"], content["num_samples"], content["num_tokens"]) == (60, 60, tokens)
    assert sum(content["length_histogram"].values()) == 60
    assert (content["handler"], content["kind"]) == ("GeneralPretrainHandler", "pretrain")
    assert (content["keys"], content["level"]) == (["text"], "document")
    assert content["tokenizer"]["path"] == str(toys / "tok") and content["tokenizer"]["type"] == "PretrainedFromHF"
    [file] = content["inputs"]
    assert file["path"] == str(toys / "text.jsonl") and file["size"] == (toys / "text.jsonl").stat().st_size
    assert len(content["inputs_hash"]) == len(content["options_hash"]) == 32 and content["seconds"] > 0
    shown = capsys.readouterr().out
    assert "records read       60\n" in shown and f"tokens             {tokens:,}\n" in shown
    assert "out/data_text_document.bin" in shown


def test_instructions(toys: Path) -> None:
    preprocess(*SFT)
    keys = ("input_ids", "attention_mask", "labels")
    assert sorted(contents(toys / "out")) == sorted(
        f"_packed_{key}_document{suffix}" for key in keys for suffix in (".bin", ".idx")
    )
    ids, mask, labels = (IndexedReader(f"out/data_packed_{key}_document") for key in keys)
    tokenizer = byte_tokenizer(["<pad>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"])
    assert len(ids) == len(mask) == len(labels) == len(RECORDS)
    for number, record in enumerate(RECORDS):
        targets = labels[number] != -100
        assert (ids[number][targets] == labels[number][targets]).all() and set(mask[number]) == {1}
        assert len(ids[number][targets]) == len(record["output"]) + 2  # the reply, <|im_end|> and a line end
    content = summary(toys / "out")
    assert content["num_targets"] == sum(len(record["output"]) + 2 for record in RECORDS)
    assert content["prompt_type"] == "qwen3" and not content["pack"]
    assert len(tokenizer) > max(int(ids[i].max()) for i in range(len(ids)))


PACK = ["--pack", "--seq-length", "150"]


@pytest.mark.parametrize("options", [SFT, [*SFT, *PACK], [*SFT, *PACK, "--neat-pack"], []], ids=str)
def test_the_same_bytes_for_every_number_of_processes_and_parts(
    toys: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setattr(run_module, "BATCH_RECORDS", 7)
    source = "alpaca.jsonl" if options else "text.jsonl"
    preprocess(*options, source=source)
    expected = contents(toys / "out")
    assert expected
    for workers, parts in ((1, 5), (2, 1), (2, 2), (4, 200)):
        name = f"w{workers}n{parts}"
        argv = [*options, "--workers", str(workers), "--n-subs", str(parts)]
        preprocess(*argv, source=source, prefix=f"out/{name}")
        assert contents(toys / "out", name) == expected
    assert not [path for path in (toys / "out").iterdir() if path.name.startswith(".")]


def test_packs_hold_every_sample_and_what_they_say(toys: Path) -> None:
    preprocess(*SFT)
    single = [IndexedReader(f"out/data_packed_{key}_document") for key in ("input_ids", "labels")]
    samples = sorted(
        (ids.tolist(), labels.tolist())
        for ids, labels in zip(*([r[i] for i in range(len(r))] for r in single), strict=True)
    )
    preprocess(*SFT, *PACK, "--neat-pack", prefix="out/packed")
    keys = ("input_ids", "labels", "attention_mask")
    ids, labels, segments = (IndexedReader(f"out/packed_packed_{key}_document") for key in keys)
    assert set(ids.lengths) == set(labels.lengths) == set(segments.lengths) == {150}
    found = []
    for row in range(len(ids)):
        for number in range(1, int(segments[row].max()) + 1):
            mine = segments[row] == number
            found.append((ids[row][mine].tolist(), labels[row][mine].tolist()))
        padding = segments[row] == 0
        pad_id = byte_tokenizer(pad_token="<pad>").pad_token_id
        assert set(ids[row][padding]) <= {pad_id} and set(labels[row][padding]) <= {-100}
    assert sorted(found) == samples
    content = summary(toys / "out", "packed")
    assert (content["num_samples"], content["num_packs"]) == (60, len(ids))
    assert content["num_tokens"] == sum(len(sample) for sample, _ in samples)


def test_a_sample_of_exactly_the_length_fills_a_pack(toys: Path) -> None:
    """Nothing is cut from a sample of --seq-length tokens, and nothing is dropped."""
    preprocess(*SFT)
    lengths = IndexedReader("out/data_packed_input_ids_document").lengths
    longest = int(lengths.max())
    preprocess(*SFT, "--pack", "--seq-length", str(longest), prefix="out/packed")
    content = summary(toys / "out", "packed")
    assert (content["num_samples"], content["num_tokens"]) == (60, int(lengths.sum()))
    assert content["num_targets"] == summary(toys / "out")["num_targets"]


def test_one_record_with_four_workers_and_parts(toys: Path) -> None:
    write_jsonl(toys / "one.jsonl", RECORDS[:1])
    preprocess(*SFT, source="one.jsonl")
    preprocess(*SFT, "--workers", "4", "--n-subs", "9", source="one.jsonl", prefix="out/four")
    assert contents(toys / "out") == contents(toys / "out", "four")
    assert len(IndexedReader("out/four_packed_labels_document")) == 1


def test_skipped_records_are_counted_by_reason(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": "good"}, {"text": " \n"}, {"body": "x"}, {"text": 3}, {"text": ""}, {"text": "also good"}]
    file = write_jsonl(toys / "odd.jsonl", rows)
    with pytest.raises(UserError, match=r"odd\.jsonl:3: .*'text'"):
        preprocess(source="odd.jsonl")
    assert not (toys / "out").exists()
    preprocess("--on-bad-record", "skip", "--n-subs", "3", source="odd.jsonl")
    content = summary(toys / "out")
    assert (content["num_records"], content["num_samples"]) == (6, 2)
    assert content["skipped"]["empty text"] == 2 and sum(content["skipped"].values()) == 4
    assert content["first_skipped"]["empty text"] == [f"{file.name}:2", f"{file.name}:5"]
    assert "2  empty text (first at odd.jsonl:2, odd.jsonl:5)" in capsys.readouterr().out


def test_nothing_left_is_an_error_and_leaves_nothing(toys: Path) -> None:
    write_jsonl(toys / "blank.jsonl", [{"text": " "}] * 3)
    with pytest.raises(UserError, match="no sample is left of 3 records: 3 records skipped: empty text"):
        preprocess(source="blank.jsonl")
    (toys / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match=r"empty\.jsonl'? holds no records"):
        preprocess(source="empty.jsonl")
    assert list((toys / "out").iterdir()) == []


def test_paths_with_spaces_and_the_name_of_the_prefix(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = toys / "my data" / "data_text_document"
    folder.mkdir(parents=True)
    write_jsonl(folder / "my data.jsonl", [{"text": "a"}, {"text": "b"}])
    preprocess("--n-subs", "2", source=str(folder / "my data.jsonl"), prefix=str(folder / "data"))
    assert sorted(contents(folder)) == ["_text_document.bin", "_text_document.idx"]
    monkeypatch.chdir(folder)
    # A bare name.
    tokenizer = ["--tokenizer-name-or-path", str(toys / "tok")]
    preprocess(*tokenizer, source="my data.jsonl", prefix="données 谢谢")
    assert contents(folder, "données 谢谢") == contents(folder)


def test_several_columns(toys: Path) -> None:
    write_jsonl(toys / "two.jsonl", [{"title": f"T{i}", "body": f"Body {i}."} for i in range(5)])
    preprocess("--json-keys", "title", "body", source="two.jsonl")
    for key, first in (("title", "T3"), ("body", "Body 3.")):
        assert byte_tokenizer().decode(IndexedReader(f"out/data_{key}_document")[3]) == first
    assert summary(toys / "out")["num_tokens"] == 5 * (2 + 7)


def test_pairs(toys: Path) -> None:
    rows = [{"question": f"Q{i}", "system": "", "chosen": "good", "rejected": "bad"} for i in range(4)]
    write_jsonl(toys / "pairs.jsonl", rows)
    keys = json.dumps({"prompt": "question", "query": "", "system": "system"})
    argv = ["--handler-name", "AlpacaStylePairwiseHandler", "--prompt-type", "qwen3", "--map-keys", keys]
    preprocess(*argv, source="pairs.jsonl")
    assert sorted(contents(toys / "out")) == sorted(
        f"_packed_{side}_{key}_document{suffix}"
        for side in ("chosen", "rejected")
        for key in ("input_ids", "labels")
        for suffix in (".bin", ".idx")
    )
    content = summary(toys / "out")
    both = [
        IndexedReader(f"out/data_packed_{side}_input_ids_document").lengths.sum() for side in ("chosen", "rejected")
    ]
    assert content["num_tokens"] == sum(both) and content["num_targets"] == 4 * (len("good") + len("bad") + 4)


def test_data_sets_of_dataset_info(toys: Path) -> None:
    info = {"one": {"file_name": "alpaca.jsonl"}, "two": {"file_name": "two.jsonl", "columns": {"prompt": "q"}}}
    (toys / "dataset_info.json").write_text(json.dumps(info))
    write_jsonl(toys / "two.jsonl", [{"q": f"Q{i}", "output": "A"} for i in range(3)])
    argv = ["--handler-name", "LlamaFactoryInstructionHandler", "--prompt-type", "qwen3", "--dataset-dir", str(toys)]
    preprocess(*argv, "--max-samples", "10", source="one,two")
    assert summary(toys / "out")["num_records"] == 13
    preprocess(*argv, "--mix-strategy", "interleave_under", "--n-subs", "2", source="one,two", prefix="out/mixed")
    assert summary(toys / "out", "mixed")["num_records"] == 6
    with pytest.raises(UserError, match=r"--input: 'oen' is not in .*dataset_info\.json; did you mean 'one'"):
        preprocess(*argv, source="oen")


def test_check_writes_nothing(toys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess(*SFT, *PACK, "--check", "--workers", "3")
    shown = capsys.readouterr().out
    assert not (toys / "out").exists()
    for words in (
        "AlpacaStyleInstructionHandler (instruction)",
        "alpaca.jsonl: 1 file, ",
        "about 60 records",
        "tok (PretrainedFromHF): 263 tokens",
        "qwen3",
        "of 150 tokens, samples one text",
        "20 tried: 20 samples",
        "out/data_packed_labels_document.bin/.idx",
    ):
        assert words in shown
    write_jsonl(toys / "alpaca.jsonl", [{"instruction": "q"}])
    with pytest.raises(UserError, match=r"alpaca\.jsonl:1: .*'output'"):
        preprocess(*SFT, "--check")


def test_vocabulary_too_large_for_the_model(toys: Path) -> None:
    preprocess("--pad-vocab-size-to", "263", source="text.jsonl")
    with pytest.raises(UserError, match="--pad-vocab-size-to 262: the tokenizer has 263 tokens"):
        preprocess("--pad-vocab-size-to", "262", source="text.jsonl")


def test_megatron_core_reads_the_output(toys: Path) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    preprocess(source="text.jsonl", prefix="out/text")
    preprocess(*SFT, *PACK, "--n-subs", "3", prefix="out/sft")
    for prefix in ("out/text_text_document", "out/sft_packed_input_ids_document", "out/sft_packed_labels_document"):
        theirs, ours = indexed.IndexedDataset(prefix), IndexedReader(prefix)
        assert len(theirs) == len(ours) > 5
        assert all(np.array_equal(theirs[i], ours[i]) for i in range(len(ours)))
        assert theirs.document_indices.tolist() == ours.documents.tolist()


def test_the_common_path_loads_no_big_library(toys: Path, repository: Path) -> None:
    watch = (
        "import atexit\n"
        "big = ('torch', 'transformers', 'datasets', 'pyarrow', 'megatron', 'pandas')\n"
        "atexit.register(lambda: print([name for name in big if name in sys.modules], file=sys.stderr))"
    )
    for argv in (["--input", "text.jsonl"], ["--input", "alpaca.jsonl", *SFT, *PACK, "--workers", "2"]):
        process = started(repository, toys, *argv, "--output-prefix", "out/data", patch=watch)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert errors.splitlines()[-1] == "[]"


def test_workers_that_die_are_reported(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_MOST_THREADS", 0)
    monkeypatch.setattr(engine, "_run_in_worker", _die)
    with pytest.raises(UserError, match="a worker process was killed, most likely because memory ran out"):
        preprocess(*SFT, "--workers", "2")
    assert list((toys / "out").iterdir()) == []


def _die(records: object) -> None:
    import os

    os._exit(3)


def test_an_empty_name_among_data_sets(toys: Path) -> None:
    (toys / "dataset_info.json").write_text('{"a": {"file_name": "alpaca.jsonl"}, "b": {"file_name": "alpaca.jsonl"}}')
    argv = ["--handler-name", "LlamaFactoryInstructionHandler", "--prompt-type", "qwen3", "--dataset-dir", "."]
    for names in ("a,,b", ",a", "a, ,b", "a,"):
        with pytest.raises(UserError, match=f"--input {names}: a name is empty"):
            preprocess(*argv, source=names)
    preprocess(*argv, source="a, b")
