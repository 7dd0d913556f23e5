"""Mistakes in the flags and the files, each with the message that a user sees, before anything is laid out."""

import logging
import re
import subprocess
import sys

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedWriter
from mindspeed_llm.training.data import content
from mindspeed_llm.training.data.datasets import build_datasets
from mindspeed_llm.training.data.sources import check_data, named_blends, named_text
from tests.training.data.helpers import EOD, VOCAB, arguments, documents, save_tokenizer


@pytest.fixture
def files(tmp_path):
    documents(tmp_path / "a", [40] * 50, seed=0)
    documents(tmp_path / "few", [300, 300], seed=1)
    documents(tmp_path / "short", [16], seed=2)
    documents(tmp_path / "empty", [], seed=2)
    documents(tmp_path / "x_packed_input_ids_document", [5], seed=2)
    documents(tmp_path / "x_packed_labels_document", [5], seed=2)
    documents(tmp_path / "y_text_document", [5], seed=2)
    (tmp_path / "half.bin").write_bytes(b"")
    (tmp_path / "damaged.idx").write_bytes(b"MMIDIDX\x00\x00" + b"\x00" * 30)
    (tmp_path / "damaged.bin").write_bytes(b"")
    (tmp_path / "notes.docx").write_text("x")
    save_tokenizer(tmp_path / "tokenizer")
    return tmp_path


_WORDS = ("a", "few", "short", "empty", "x", "x_packed_labels_document", "y", "half", "damaged", "notes.docx",
          "nothing", "y_txt_document")  # fmt: skip
# Flags (names of files stand for their paths), and what the message says.
MISTAKES = {
    "": "no data are named: give --data-path PREFIX (or a raw file), --train-data-path, or --mock-data",
    "--mock-data --data-path a": "--mock-data makes samples up, so that --data-path cannot be used",
    "--mock-data --split 1,1,1": "--mock-data makes samples up, so that --split cannot be used",
    "--data-path a --valid-data-path a": "leave it or --valid-data-path out",
    "--valid-data-path a": "--valid-data-path is given without --train-data-path",
    "--train-data-path a --split 1,1,1": "--split 1,1,1 cuts the files of --data-path, but --train-data-path is given",
    "--data-path a --split 9,a": "split = '9,a' is not a list of up to three numbers",
    "--data-path a --split 0,1,1": "--split 0,1,1 has no share for training",
    "--data-path a --split 0,0,0": "gives every part 0",
    "--data-path 0.3 a few": "--data-path: '0.3 {a} {few}' is neither names alone nor a weight before every name",
    "--data-path 0.3 a -1 few": "weights [0.3, -1.0]; expected numbers from 0 on, not all 0",
    "--data-path 0 a 0 few": "weights [0.0, 0.0]; expected numbers from 0 on, not all 0",
    "--data-path nothing": "--data-path: {nothing} is neither the prefix of {nothing}.bin and {nothing}.idx, nor a raw",
    "--train-data-path a --test-data-path nothing": "--test-data-path: {nothing} is neither the prefix",
    "--data-path y_txt_document": "did you mean {y}_text_document?",
    "--data-path half": "--data-path: {half}.bin exists, but {half}.idx does not",
    "--data-path damaged": "damaged.idx is not an index file of Megatron's format",
    "--data-path empty": "--data-path: {empty} holds no documents",
    "--data-path x": "--data-path: {x} is an output prefix; below it is instruction data, not pretraining text",
    "--data-path x_packed_labels_document": "is one file of instruction data, not pretraining text",
    "--data-path y": "--data-path: {y} is an output prefix; give the text below it, {y}_text_document",
    "--data-path notes.docx": "has an unknown type '.docx'",
    "--data-path few --split 90,10,0": "--split 90,10,0 leaves no document of {few} for validation: a share of 0.1 of "
    "2 documents; raise it, set --eval-iters 0, or use data of more documents",
    "--data-path 1 a 1 few --split 90,10,0": "leaves no document of {few} for validation",
    "--data-path short --split 1,0,0": "--data-path: {short} has 16 tokens for training, but a sample of --seq-length "
    "16 takes 17 and would hold them several times; use more data, or a smaller --seq-length",
    "--data-path 1 a 1 short --split 1,0,0": "{short} has 16 tokens for training",
    "--train-data-path a --valid-data-path short": "--valid-data-path: {short} has 16 tokens for validation",
    "--train-data-path a --test-data-path short": "{short} has 16 tokens for the test, but a sample of --seq-length 16 "
    "takes 17 and would hold them several times; use more data, set --eval-iters 0, or a smaller --seq-length",
    "--data-path a --split 1,0,0 --vocab-size 200": "--data-path: {a} holds token 2",
    "--data-path a --reset-attention-mask --eod-mask-loss": "--reset-attention-mask --eod-mask-loss: the token that "
    "ends documents is not known; name the tokenizer with --tokenizer-name-or-path",
    "--data-path a --tokenizer-name-or-path nothing": "--tokenizer-name-or-path {nothing} does not exist",
    "--data-path a --tokenizer-type GPT2BPETokenizer": "--tokenizer-type GPT2BPETokenizer needs --vocab-file",
}


def _arguments(folder, line):
    return arguments(*(str(folder / word) if word in _WORDS else word for word in line.split()))


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes(files, line):
    message = MISTAKES[line]
    for word in _WORDS:
        message = message.replace(f"{{{word}}}", str(files / word))
    for check in (check_data, build_datasets):
        with pytest.raises(UserError, match=re.escape(message)):
            check(_arguments(files, line))
    assert not (files / "cache").exists()


def test_what_is_right_passes(files):
    for line in (
        "--data-path a",
        "--data-path a short --split 98,2,0",
        "--data-path 0 short 1 a --split 90,10,0",
        "--data-path few --split 50,50",
        "--mock-data --reset-attention-mask",
        "--train-data-path a --valid-data-path short --eval-iters 0",
    ):
        check_data(_arguments(files, line))
        assert build_datasets(_arguments(files, line)).train.rows


def test_the_tokenizer_and_the_model_must_fit(files):
    tokenizer = files / "tokenizer"
    args = arguments("--data-path", files / "a", "--tokenizer-name-or-path", tokenizer, "--vocab-size", 257)
    with pytest.raises(UserError, match=r"the tokenizer has 258 tokens, but the model's vocabulary has 257"):
        check_data(args)
    save_tokenizer(files / "endless", eos_token=None)
    args = arguments("--data-path", files / "a", "--tokenizer-name-or-path", files / "endless", "--eod-mask-loss")
    with pytest.raises(UserError, match=r"--eod-mask-loss: the tokenizer has no eos token"):
        check_data(args)


@pytest.mark.parametrize("place", [0, 150_000, -1])
def test_ids_out_of_range_anywhere_in_a_large_file(tmp_path, monkeypatch, place):
    ids = np.ones(200_000, dtype=np.int32)
    ids[place] = VOCAB
    with IndexedWriter(tmp_path / "a") as writer:
        writer.add_many(ids, [1000] * 200)
    with pytest.raises(UserError, match=f"a holds token {VOCAB}, but the model's vocabulary has {VOCAB} "):
        check_data(arguments("--data-path", tmp_path / "a"))
    # Of a file that is larger than what is looked at, stretches from the first id to the last.
    monkeypatch.setattr(content, "_STRETCH", 1000)
    if place == 150_000:
        check_data(arguments("--data-path", tmp_path / "a"))
        ids[place - 1500 : place + 1500] = VOCAB
        with IndexedWriter(tmp_path / "a") as writer:
            writer.add_many(ids, [1000] * 200)
    with pytest.raises(UserError, match=f"holds token {VOCAB}"):
        check_data(arguments("--data-path", tmp_path / "a"))


def test_documents_without_ends_are_reported(files, caplog):
    documents(files / "open", [40] * 50, seed=0, eod=None)
    words = ["--split", "1,0,0", "--tokenizer-name-or-path", files / "tokenizer"]
    for name, flags, is_told in (
        ("a", ["--reset-attention-mask"], False),
        ("open", [], False),
        ("open", ["--eod-mask-loss"], True),
    ):
        caplog.clear()
        check_data(arguments("--data-path", files / name, *words, *flags))
        assert (f"open has no document that ends with the end-of-document token {EOD}" in caplog.text) == is_told


def test_data_of_another_tokenizer_are_reported(files, caplog):
    from mindspeed_llm.tasks.preprocess.command.main import main

    (files / "text.jsonl").write_text('{"text": "some text, and more of it"}\n' * 30)
    words = ["--input", files / "text.jsonl", "--output-prefix", files / "made_of" / "it", "--append-eod"]
    main([*map(str, words), "--tokenizer-name-or-path", str(files / "tokenizer")])
    logging.getLogger("mindspeed_llm").propagate = True  # the command prints by itself
    save_tokenizer(files / "other", bos_token="<begin>")
    prefix = files / "made_of" / "it_text_document"
    for tokenizer, is_told in ((files / "tokenizer", False), (files / "other", True)):
        caplog.clear()
        check_data(arguments("--data-path", prefix, "--split", "1,0,0", "--tokenizer-name-or-path", tokenizer))
        assert ("it_text_document was made with another tokenizer than the one of this run" in caplog.text) == is_told


def test_parts_that_the_default_split_leaves_empty_are_reported(files, caplog):
    caplog.set_level(logging.INFO, "mindspeed_llm")
    check_data(_arguments(files, "--data-path few"))
    assert "no validation: --split 969,30,1 leaves no document of" in caplog.text
    assert "no test: --split 969,30,1 leaves no document of" in caplog.text
    caplog.clear()
    check_data(_arguments(files, "--data-path few --eval-iters 0"))
    assert "no validation" not in caplog.text


def test_a_prefix_may_be_written_with_its_ending(files):
    for ending in ("", ".bin", ".idx"):
        [blend] = named_blends(arguments("--data-path", f"{files / 'a'}{ending}"), named_text)
        assert blend.names == (files / "a",)


def test_checking_needs_no_torch():
    code = (
        "import sys, mindspeed_llm.training.data.sources\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
