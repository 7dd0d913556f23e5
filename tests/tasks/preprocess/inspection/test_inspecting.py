"""The whole way from files to what is printed, for every kind of data."""

import io
import sys

import numpy as np
import pytest

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.indexed_format import IndexedReader
from mindspeed_llm.tasks.preprocess.inspection import inspect_prefix
from mindspeed_llm.tasks.preprocess.inspection.data_set import DataSet
from mindspeed_llm.tasks.preprocess.inspection.locating import locate
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from tests.support.tokenizers import chatml_tokenizer
from tests.tasks.preprocess.inspection.data import (
    CHAT,
    PAD,
    TOKENIZER,
    N,
    ids_of,
    marked,
    sample_of,
    trained_texts,
    without_signs,
    write,
    write_chats,
    write_file,
    write_summary,
)


@pytest.fixture
def shown(tmp_path, capsys):
    """Inspect a prefix of the folder and return what is printed below the legend."""

    def inspect(prefix="a", **options):
        inspect_prefix(tmp_path / prefix, **{"tokenizer": TOKENIZER, **options})
        return capsys.readouterr().out.split("\n\n", 2)[-1]

    return inspect


def test_instruction(tmp_path, shown):
    write_chats(tmp_path / "a", CHAT, [("q", False), ("a", True)], [("third", True)])
    text = shown(num=2)
    assert marked(text) == [*trained_texts(CHAT), "a"]
    assert [line.split(" · ")[0] for line in text.splitlines() if line.startswith("──")] == [
        "── sample 0",
        "── sample 1",
    ]
    # The first token of a sample is never predicted.
    assert "t⟦hird⟧" in shown(num=3)


def test_pretraining(tmp_path, shown):
    write_file(tmp_path / "a_text_document", [ids_of("中文 text</s>"), ids_of("b")])
    assert "\n⟨part of 中⟩⟦中文 text</s>⟧\n" in shown()
    write_file(tmp_path / "b_text_document", [ids_of("x中文\n</s>")])
    assert "── sample 0 · 9 tokens · 8 targets (88.9 %) ──\nx⟦中文↵\n</s>⟧" in shown("b")
    write_file(tmp_path / "c_title_document", [ids_of("Tea")])
    write_file(tmp_path / "c_body_document", [ids_of("Green")])
    assert [line for line in shown("c").splitlines() if "⟦" in line] == ["G⟦reen⟧", "T⟦ea⟧"]


def test_sentences_of_documents(tmp_path, shown):
    sentences = [ids_of("One."), ids_of("Two."), ids_of("Other.")]
    write_file(tmp_path / "a_text_sentence", sentences, document_sizes=np.array([2, 1]))
    assert shown().splitlines() == [
        "── sample 0 · 8 tokens · 7 targets (87.5 %) ──",
        "── 1 of 2: 4 tokens, 3 with loss ──", "O⟦ne.⟧", "── 2 of 2: 4 tokens, 4 with loss ──", "⟦Two.⟧",
        "", "── sample 1 · 6 tokens · 5 targets (83.3 %) ──", "O⟦ther.⟧",
        "", "the data set holds no more than 2 samples",
    ]  # fmt: skip


def test_pairs(tmp_path, shown):
    sides = {"chosen": [("q", False), ("yes", True)], "rejected": [("q", False), ("no", True)]}
    columns = {}
    for side, parts in sides.items():
        ids, labels = sample_of(parts)
        columns |= {f"{side}_input_ids": [ids], f"{side}_labels": [labels]}
    write(tmp_path / "a", **columns)
    assert marked(shown()) == ["yes", "no"]


def test_packs(tmp_path, shown):
    ids, labels = sample_of([("q", False), ("a", True), ("r", False), ("b", True)])
    pad, none = [PAD] * 3, [N] * 3
    write(tmp_path / "a", input_ids=[ids + pad], labels=[labels + none], attention_mask=[[1, 1, 2, 2, 0, 0, 0]])
    write_summary(tmp_path / "a", num_samples=2, num_packs=1, pack=True, neat_pack=True, seq_length=7)
    text = shown()
    assert marked(text) == ["a", "b"]
    assert "── 2 of 2: 2 tokens, 1 with loss ──\nr⟦b⟧\n[padding: 3 x <pad>]" in text
    # Without numbers in the mask the samples of a pack cannot be told apart.
    write(tmp_path / "b", input_ids=[ids + pad], labels=[labels + none], attention_mask=[[1] * 7])
    write_summary(tmp_path / "b", num_samples=2, num_packs=1, pack=True, seq_length=7)
    assert "── sample 0 · 4 tokens · 2 targets (50.0 %) · 3 padding ──\nq⟦a⟧r⟦b⟧\n[padding: 3 x <pad>]" in shown("b")


def test_prompts(tmp_path, shown):
    write(tmp_path / "a", input_ids=[ids_of("2+2=")], attention_mask=[[1] * 4])
    assert shown(num=1) == "── sample 0 · 4 tokens ──\n2+2=\n"
    # Of prompts with answers, `labels` holds the answer.
    write(tmp_path / "b", input_ids=[ids_of("2+2=")], attention_mask=[[1] * 4], labels=[ids_of("four")])
    write_summary(tmp_path / "b", kind="prompt")
    assert shown("b", num=1) == "── sample 0 · prompt · 4 tokens ──\n2+2=\n── labels · 4 tokens ──\nfour\n"


def test_num(tmp_path, shown):
    write_chats(tmp_path / "a", CHAT)
    for num in (0, -1):
        with pytest.raises(UserError, match=f"--num {num}: expected"):
            shown(num=num)
    assert shown(num=10).endswith("\n\nthe data set holds no more than 1 samples\n")
    write(tmp_path / "b", input_ids=[], labels=[])
    assert shown("b") == "the data set holds no samples\n"


def test_the_tokenizer_of_the_summary(tmp_path, capsys):
    TOKENIZER.save_pretrained(tmp_path / "tok")
    write_chats(tmp_path / "a", CHAT)

    def inspect(tokenizer=None, **entry):
        write_summary(tmp_path / "a", num_samples=1, tokenizer=entry)
        inspect_prefix(tmp_path / "a", tokenizer=tokenizer)
        return capsys.readouterr().out

    entry = {"type": "PretrainedFromHF", "path": str(tmp_path / "tok")}
    assert marked(inspect(**entry))[-2:] == trained_texts(CHAT)
    assert "warning" not in inspect(as_tokenizer(TOKENIZER), **entry, identity=as_tokenizer(TOKENIZER).identity())
    assert "the tokenizer has changed since it made the data" in inspect(**entry, identity="other")
    other = as_tokenizer(chatml_tokenizer(bos_token=None))
    assert "the tokenizer is not the one that made the data" in inspect(other, **entry, identity="x")
    with pytest.raises(UserError, match=r"gone does not exist; name the tokenizer with --tokenizer-name-or-path"):
        inspect(path=str(tmp_path / "gone"))
    with pytest.raises(UserError, match="has a summary that does not name its tokenizer"):
        inspect()
    (tmp_path / "a_summary.json").unlink()
    with pytest.raises(UserError, match="has no summary that names its tokenizer"):
        inspect_prefix(tmp_path / "a")
    inspect_prefix(tmp_path / "a", tokenizer=TOKENIZER)
    assert "warning: no summary: the run that made these files has not finished" in capsys.readouterr().out


def test_the_head(tmp_path, capsys):
    write_chats(tmp_path / "a", CHAT)
    write_summary(
        tmp_path / "a", kind="instruction", handler="AlpacaStyleInstructionHandler", prompt_type="qwen3",
        tokenizer={"type": "PretrainedFromHF", "path": "./tok"}, seq_length=4096, num_records=1200, num_samples=1,
        num_tokens=200, num_targets=50, empty_replies=1,
        skipped={"no reply": 1199}, first_skipped={"no reply": ["f:1"]},
        length_histogram={"129-256": 1},
    )  # fmt: skip
    inspect_prefix(tmp_path / "a", tokenizer=TOKENIZER)
    head = capsys.readouterr().out.split("\n\n")[0]
    assert head.splitlines() == [
        f"{tmp_path}/a (instruction)",
        "  handler          AlpacaStyleInstructionHandler",
        "  template         qwen3",
        "  tokenizer        ./tok (PretrainedFromHF)",
        "  sequence length  4,096",
        "  records          1,200 read, 1,199 skipped",
        "  samples          1",
        "  tokens           200, of which 50 (25.0 %) carry loss",
        "  empty replies    1 record",
        "                   1,199 records skipped: no reply (first at f:1)",
        "  lengths in tokens",
        f"    129-256  1  {'█' * 30}",
    ]
    write_summary(tmp_path / "a", num_samples=7)
    inspect_prefix(tmp_path / "a", tokenizer=TOKENIZER)
    assert "warning: the summary speaks of 7 sequences, but the files hold 1" in capsys.readouterr().out


def test_an_output_that_has_few_characters(tmp_path, monkeypatch):
    write_chats(tmp_path / "a", [("q中", False), ("é", True)])
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    inspect_prefix(tmp_path / "a", tokenizer=TOKENIZER)
    output.flush()
    text = output.buffer.getvalue().decode("ascii")
    assert "-- sample 0 | 6 tokens | 2 targets (33.3 %) --\nq\\u4e2d{+\\xe9+}\n" in text


def test_files_that_do_not_belong_together(tmp_path):
    def data_set(name="a"):
        return DataSet(locate(tmp_path / name), frozenset())

    write(tmp_path / "a", input_ids=[[1, 2], [3]], labels=[[N, 2]])
    with pytest.raises(UserError, match="numbers of samples differ: input_ids 2, labels 1"):
        data_set()
    write(tmp_path / "a", labels=[[N, 2], [3, 4]])
    assert len(data_set()) == 2
    with pytest.raises(UserError, match="sample 1 has 1 ids, but 2 labels"):
        data_set()[1]
    write(tmp_path / "a", labels=[[N, 2], [3]], attention_mask=[[1, 1], [1, 1]])
    with pytest.raises(UserError, match="sample 1 has 1 ids, but a mask of 2"):
        data_set()[1]
    write(tmp_path / "b", labels=[[1]])
    with pytest.raises(UserError, match="the files of input_ids are missing"):
        data_set("b")
    write(tmp_path / "c", chosen_input_ids=[[1]], chosen_labels=[[1]])
    with pytest.raises(UserError, match="the files of rejected_input_ids, rejected_labels are missing"):
        data_set("c")
    (tmp_path / "a_packed_labels_document.bin").unlink()
    with pytest.raises(UserError, match=r"labels_document\.bin does not exist"):
        data_set()


def test_damaged_offsets_are_an_error(tmp_path, monkeypatch):
    write_file(tmp_path / "a_text_document", [[1, 2], [3]])
    data_set = DataSet(locate(tmp_path / "a"), frozenset())

    def broken(self, index):
        raise ValueError("offset must be non-negative")

    monkeypatch.setattr(IndexedReader, "__getitem__", broken)
    with pytest.raises(UserError, match=r"a_text_document\.idx is damaged at sequence 1"):
        data_set[1]


def test_signs_of_the_test_data_cover_what_is_shown():
    assert without_signs("a↵\n⇥\t\\u200b\\r") == "a\n\t\u200b\r"
