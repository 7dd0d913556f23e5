"""Which samples fine-tuning takes, in which order, and what it says where the data do not fit."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.posttrain.instruction_sources import CutSampleSet, check_instructions
from mindspeed_llm.tasks.posttrain.instructions import build_instructions
from mindspeed_llm.tasks.posttrain.main import main
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedWriter
from mindspeed_llm.training.data.datasets import Progress
from mindspeed_llm.training.data.sources import check_data
from tests.support.tokenizers import byte_tokenizer
from tests.tasks.posttrain.conversations import make_records, make_tokenizer, rendered, write_records
from tests.training.arguments.lines import DENSE, EXPERTS, arguments

pytestmark = pytest.mark.usefixtures("logging_as_before")
BASE = DENSE.replace("--mock-data", "").replace("--train-iters 10", "--train-iters 5")
COUNT = 20


def flags(data: Any, rest: str = "", *, base: str = BASE) -> Namespace:
    line = f"--stage sft --global-batch-size 8 --split 100,0,0 --eval-iters 0 --data-path {data} {rest}"
    return arguments(line, base=base)


def write_samples(prefix: Path, samples: list[tuple[list[int], list[int]]], **more: list[list[int]]) -> Path:
    """The files of instruction data, sample by sample."""
    keys = {
        "input_ids": [ids for ids, _ in samples],
        "labels": [labels for _, labels in samples],
        "attention_mask": [[1] * len(ids) for ids, _ in samples],
        **more,
    }
    for key, rows in keys.items():
        with IndexedWriter(f"{prefix}_packed_{key}_document") as writer:
            for numbers in rows:
                writer.add(np.array(numbers, dtype=np.int32))
    return prefix


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """20 samples; the first token of each is its number."""
    return write_samples(tmp_path / "data", [([number, 100, 101], [-100, 100, 101]) for number in range(COUNT)])


def numbers(args: Namespace, progress: Progress | None = None) -> list[int]:
    rows = build_instructions(args, progress).train.rows
    return [int(rows[place]["input_ids"][0]) for place in range(len(rows))]


def test_every_epoch_has_each_sample_once(data: Path) -> None:
    found = numbers(flags(data))
    assert len(found) == 40
    assert [sorted(found[:COUNT]), sorted(found[COUNT:])] == [list(range(COUNT))] * 2
    assert found[:COUNT] != found[COUNT:] and found[:COUNT] != sorted(found[:COUNT])
    assert numbers(flags(data, "--seed 3")) != found == numbers(flags(data))


def test_the_order_of_the_files(data: Path) -> None:
    assert numbers(flags(data, "--no-shuffle")) == [*range(COUNT), *range(COUNT)]


def test_all_epochs_shuffled_together(data: Path) -> None:
    found = numbers(flags(data, "--full-shuffle-instruction-dataset"))
    assert sorted(found) == sorted([*range(COUNT), *range(COUNT)])
    assert sorted(found[:COUNT]) != list(range(COUNT))


def test_epochs_that_are_whole_steps(data: Path) -> None:
    """20 samples are two steps and a half: the first four come once more."""
    found = numbers(flags(data, "--padded-samples"))
    assert len(found) == 48
    for epoch in (found[:24], found[24:]):
        assert sorted(epoch[:COUNT]) == list(range(COUNT)) and epoch[COUNT:] == epoch[:4]


@pytest.mark.parametrize("words", ["", "--full-shuffle-instruction-dataset", "--padded-samples"])
def test_a_run_that_goes_on_longer_keeps_its_order(data: Path, words: str) -> None:
    first = build_instructions(flags(data, words))
    began = [int(first.train.rows[place]["input_ids"][0]) for place in range(len(first.train.rows))]
    progress = Progress(iteration=5, consumed_samples=40, layouts=first.layouts)
    longer = numbers(flags(data, f"{words} --train-iters 9"), progress)
    assert longer[: len(began)] == began and len(longer) >= 72


def test_blends_and_parts(data: Path, tmp_path: Path) -> None:
    other = write_samples(tmp_path / "other", [([50 + number, 100], [-100, 100]) for number in range(10)])
    found = numbers(flags(f"0.25 {data} 0.75 {other}"))
    assert [sum(number >= 50 for number in found), sum(number < 50 for number in found)] == [30, 10]
    args = arguments(
        f"--stage sft --global-batch-size 8 --data-path {data} --split 80,20,0 --eval-interval 5 --eval-iters 1 "
        "--no-shuffle",
        base=BASE,
    )
    parts = build_instructions(args)
    assert parts.valid is not None and parts.test is None
    assert {int(parts.train.rows[place]["input_ids"][0]) for place in range(40)} == set(range(16))
    assert {int(parts.valid.rows[place]["input_ids"][0]) for place in range(8)} == set(range(16, 20))


def test_samples_that_are_too_long(tmp_path: Path) -> None:
    """Cut where an answer has begun, left out where none has."""
    prefix = write_samples(
        tmp_path / "long",
        [
            ([1, 2, 3], [-100, -100, 3]),
            (list(range(40)), [-100] * 36 + [36, 37, 38, 39]),
            (list(range(40)), [-100] * 30 + list(range(30, 40))),
        ],
    )
    samples = CutSampleSet(prefix, 32)
    assert (len(samples), samples.num_cut, samples.num_left_out) == (2, 1, 1)
    assert samples.lengths.tolist() == [3, 32]
    assert samples[1]["labels"].tolist() == [-100] * 30 + [30, 31]
    assert samples.numbers_of(range(1, 3)) == range(1, 2)
    everything = write_samples(tmp_path / "none", [(list(range(40)), [-100] * 36 + [36, 37, 38, 39])])
    with pytest.raises(UserError, match="none has no sample with an answer within --seq-length 32 tokens"):
        check_instructions(flags(everything))


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return write_records(tmp_path / "raw.jsonl", make_records(30, turns=2))


RAW = "--tokenizer-name-or-path {folder}/tokenizer --handler-name AlpacaStyleInstructionHandler --seq-length 128"


def test_raw_records_are_preprocessed_once(raw: Path) -> None:
    args = flags(raw, f"{RAW.format(folder=raw.parent)} --no-shuffle")
    check_instructions(args)
    assert not (raw.parent / "cache").exists()
    rows = build_instructions(args).train.rows
    expected = [rendered(record) for record in make_records(30, turns=2)]
    assert [(rows[place]["input_ids"].tolist(), rows[place]["labels"].tolist()) for place in range(30)] == expected
    [summary] = (raw.parent / "cache").glob("*_summary.json")
    before = summary.stat().st_mtime_ns
    build_instructions(args)
    assert summary.stat().st_mtime_ns == before
    # Another template makes other samples, and so do other records.
    build_instructions(flags(raw, f"{RAW.format(folder=raw.parent)} --prompt-type qwen3"))
    write_records(raw, make_records(31, turns=2))
    build_instructions(args)
    assert len(list((raw.parent / "cache").glob("*_summary.json"))) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--handler-name AlpacaStyleInstructionHandler",
            "--data-path .*raw.jsonl is a file of records, which needs a tok",
        ),
        (
            "--tokenizer-name-or-path {folder}/tokenizer",
            "--data-path .*raw.jsonl: --handler-name is missing; choose one of AlpacaStyleInstructionHandler",
        ),
        (f"{RAW} --prompt-type quen3", "--prompt-type 'quen3': no such template; did you mean qwen3"),
        (RAW.replace("Alpaca", "Sharegpt"), "conversations"),
        (RAW.replace("/tokenizer", "/plain"), "needs a chat template, and the tokenizer brings none: .*--prompt-type"),
        (RAW.replace("Instruction", "Pairwise"), "makes pairwise data, but instruction data are wanted"),
        (RAW.replace("AlpacaStyle", "LlamaFactory"), "reads names in dataset_info.json"),
        (
            f"{RAW} --data-cache-path {{folder}}/raw.jsonl",
            "cannot be kept in .*: .* is a file; name another folder with",
        ),
    ],
)
def test_mistakes_with_records(raw: Path, words: str, message: str) -> None:
    byte_tokenizer().save_pretrained(raw.parent / "plain")
    with pytest.raises(UserError, match=message):
        check_instructions(flags(raw, words.format(folder=raw.parent)))


def test_data_of_another_tokenizer(tmp_path: Path) -> None:
    prefix = write_samples(tmp_path / "data", [([1, 509], [-100, 509])])
    with pytest.raises(UserError, match="holds token 509, but the model's vocabulary has 509"):
        check_instructions(flags(prefix))


def test_data_of_another_kind(tmp_path: Path, data: Path) -> None:
    with IndexedWriter(tmp_path / "text_document") as writer:
        writer.add(np.arange(60))
    with pytest.raises(UserError, match=r"is no instruction data: .* there is data of kind pretrain"):
        check_instructions(flags(tmp_path / "text_document"))
    with pytest.raises(UserError, match=r"neither a file of records nor the prefix .*did you mean .*data"):
        check_instructions(flags(tmp_path / "dat"))
    with pytest.raises(UserError, match="below it is instruction data, not pretraining text"):
        check_data(arguments(f"--data-path {data}", base=BASE))


def test_packs_that_do_not_fit_the_flags(tmp_path: Path, data: Path) -> None:
    content = {"format": 2, "inputs": [], "files": {}, "written": {}, "options": {}, "prompt_type": None}
    content |= {"pack": True, "neat_pack": False, "seq_length": 64}
    summary = tmp_path / "data_summary.json"
    summary.write_text(json.dumps(content))
    with pytest.raises(UserError, match="packed to 64 tokens, more than --seq-length 32; give --seq-length 64"):
        check_instructions(flags(data))
    summary.write_text(json.dumps(content | {"seq_length": 32}))
    with pytest.raises(UserError, match=r"--neat-pack: .*data was made without"):
        check_instructions(flags(data, "--pack --neat-pack --reset-attention-mask"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "--stage is missing; expected what is to be trained: sft, dpo"),
        ("--stage dpo --data-path x", "--is-pairwise-dataset is missing; add it"),
        ("--stage sft --mock-data", "--mock-data does not go with --stage sft: samples that are made up"),
        ("--stage sft --data-path x --neat-pack", "--neat-pack says how --pack packs; add --pack"),
        ("--stage sft --data-path x --pack --neat-pack", "heeds with --reset-attention-mask; add it"),
        ("--stage sft --data-path x --no-shuffle --full-shuffle-instruction-dataset", "contradict each other"),
        ("--stage sft --data-path x --padded-samples --full-shuffle-instruction-dataset", "leaves no epochs"),
        ("--stage sft --data-path x --eod-mask-loss", "the labels of the data say where there is loss"),
        ("--stage sft --data-path x --no-cut-token", "--no-cut-token is not available: a sample that is too long"),
    ],
)
def test_mistakes_in_flags(line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(shlex.split(f"{BASE} {line}"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", "needs more than 2 stages"),
        (
            f"{EXPERTS.replace('alltoall', 'allgather')} --expert-model-parallel-size 2",
            "different lengths, which --moe-token-dispatcher-type allgather cannot send; use alltoall",
        ),
    ],
)
def test_lengths_that_vary_where_they_cannot(words: str, message: str) -> None:
    line = f"--stage sft --data-path x --global-batch-size 8 {words}"
    arguments(line, base=BASE, world_size=2)
    with pytest.raises(UserError, match=f"--no-pad-to-seq-lengths.*{message}"):
        arguments(f"{line} --no-pad-to-seq-lengths", base=BASE, world_size=2)


def test_lengths_divide_over_the_ranks_of_a_sequence() -> None:
    words = "--stage sft --data-path x --no-pad-to-seq-lengths --sequence-parallel --tensor-model-parallel-size 2"
    assert arguments(f"{words} --pad-to-multiple-of 3", base=BASE, world_size=2).pad_to_multiple_of == 6


def test_flags_of_records_are_said_to_have_no_effect(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mindspeed_llm")
    check_instructions(flags(data, "--handler-name AlpacaStyleInstructionHandler --enable-thinking true"))
    assert "no effect from --handler-name, --enable-thinking, its samples are made" in caplog.text


def test_pretraining_refuses_the_flags_of_fine_tuning() -> None:
    from mindspeed_llm.training.main import main as pretrain

    for words, message in (
        ("--stage sft", "--stage sft is not for pretrain_gpt.py; posttrain_gpt.py takes it"),
        ("--is-instruction-dataset", "pretrain_gpt.py reads running text; give --stage sft to posttrain_gpt.py"),
        ("--no-shuffle", "--no-shuffle belongs to fine-tuning"),
    ):
        with pytest.raises(UserError, match=message):
            pretrain(shlex.split(f"{DENSE} {words}"))


def test_check_of_a_run(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{BASE} --stage sft --is-instruction-dataset --data-path {data} --split 100,0,0 --check"
    assert main(shlex.split(line)) == 0
    assert capsys.readouterr().out.endswith("The arguments are valid.\n")
