"""Documents, pieces and sentences of text: every token is there, against a plain loop over the ids of transformers."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess import text_work
from mindspeed_llm.tasks.preprocess.readers import Record
from mindspeed_llm.tasks.preprocess.records import UnusableRecord
from mindspeed_llm.tasks.preprocess.text_work import EMPTY_TEXT, NO_TOKEN, ONE_TOKEN, TextColumn, TextWork
from tests.support.tokenizer_files import begin, byte_level_bpe
from tests.support.tokenizers import byte_tokenizer


def _records(*rows):
    return [Record(Path("a.jsonl"), line, row) for line, row in enumerate(rows, start=1)]


def _texts(*texts):
    return _records(*({"text": text} for text in texts))


def _sequences(chunk, key="text"):
    return [part.tolist() for part in np.split(chunk.arrays[key], np.cumsum(chunk.lengths[key])[:-1])]


BEGINNING = byte_level_bpe("<s>", "</s>", "<pad>")
begin(BEGINNING, bos="<s>")
ENDING = byte_level_bpe("<s>", "</s>", "<pad>")
begin(ENDING, bos="<s>", eos="</s>")
TOKENIZERS = {
    "plain": byte_tokenizer(),
    "begin": PreTrainedTokenizerFast(tokenizer_object=BEGINNING, bos_token="<s>", eos_token="</s>"),
    "begin and end": PreTrainedTokenizerFast(
        tokenizer_object=ENDING, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ),
}


def _expected(tokenizer, texts, append_eod, multiple, piece_length, drop=False):
    """A plain loop: (sequences, reasons by place)."""
    sequences, skipped = [], []
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    for place, text in enumerate(texts, start=1):
        if not text.strip():
            skipped.append((EMPTY_TEXT, f"a.jsonl:{place}"))
            continue
        ids = tokenizer(text)["input_ids"]
        if append_eod and ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, tokenizer.eos_token_id]
        while len(ids) % multiple:
            ids.append(pad)
        if piece_length is None:
            sequences.append(ids)
        elif len(ids) == 1 and drop:
            skipped.append((ONE_TOKEN, f"a.jsonl:{place}"))
        else:
            pieces = [ids[i : i + piece_length] for i in range(0, len(ids), piece_length)]
            if len(pieces[-1]) == 1 and len(pieces) > 1 and piece_length > 2:
                pieces[-1].insert(0, pieces[-2].pop())
            sequences += pieces
    return sequences, skipped


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="ab \n谢🙂", max_size=30) | st.text(max_size=12), min_size=1, max_size=8),
    append_eod=st.booleans(),
    multiple=st.sampled_from([1, 2, 4]),
    pieces=st.none() | st.integers(1, 5),
    drop=st.booleans(),
)
def test_every_token_is_there(name, texts, append_eod, multiple, pieces, drop):
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    tokenizer = TOKENIZERS[name]
    piece_length = None if pieces is None else max(2, pieces * multiple)
    work = TextWork(
        tokenizer,
        append_eod=append_eod,
        pad_to_multiple_of=multiple,
        piece_length=piece_length,
        drop_single_tokens=drop,
    )
    chunk = work(_texts(*texts))
    sequences, skipped = _expected(tokenizer, texts, append_eod, multiple, piece_length, drop)
    assert (_sequences(chunk) if sequences else chunk.arrays["text"].tolist()) == sequences
    assert sorted(chunk.skipped) == sorted(skipped) and chunk.num_records == len(texts)
    assert chunk.arrays["text"].dtype == chunk.lengths["text"].dtype == np.int32


def test_the_loop_notices_a_lost_token(monkeypatch):
    """Mutant: a last piece of one token is left out."""
    right = text_work._in_pieces

    def losing(documents, piece_length):
        documents.lengths -= documents.lengths % piece_length == 1
        documents.sequence_lengths = documents.lengths
        documents.ids = documents.ids[: int(documents.lengths.sum())]
        return right(documents, piece_length)

    monkeypatch.setattr(text_work, "_in_pieces", losing)
    chunk = TextWork(byte_tokenizer(), piece_length=4)(_texts("abcde"))
    assert _sequences(chunk) != _expected(byte_tokenizer(), ["abcde"], False, 1, 4)[0]


def test_a_document_that_ends_with_eos_gets_no_second_one():
    tokenizer = byte_tokenizer()
    chunk = TextWork(tokenizer, append_eod=True)(_texts("a", "b</s>", "</s>"))
    assert [tokenizer.decode(ids) for ids in _sequences(chunk)] == ["a</s>", "b</s>", "</s>"]


def test_padding_token():
    padded = TextWork(byte_tokenizer(pad_token="<pad>"), pad_to_multiple_of=4)(_texts("abcde", "abcd"))
    assert byte_tokenizer(pad_token="<pad>").decode(padded.arrays["text"]) == "abcde<pad><pad><pad>abcd"
    by_eos = TextWork(byte_tokenizer(), pad_to_multiple_of=4)(_texts("abc"))
    assert byte_tokenizer().decode(by_eos.arrays["text"]) == "abc</s>"


def test_several_columns():
    records = _records({"title": "T", "body": "one"}, {"title": " ", "body": "two"}, {"title": "U", "body": ""})
    chunk = TextWork(byte_tokenizer(), ("title", "body"))(records)
    found = {key: [byte_tokenizer().decode(ids) for ids in _sequences(chunk, key)] for key in ("title", "body")}
    assert found == {"title": ["T", "U"], "body": ["one", "two"]}
    assert chunk.skipped == [("empty text (key 'title')", "a.jsonl:2"), ("empty text (key 'body')", "a.jsonl:3")]


def test_text_of_another_kind():
    def text_of(record, key):
        if "skip" in record.data:
            raise UnusableRecord("marked to be skipped")
        return f"{key}: {record.data['a']}"

    chunk = TextWork(byte_tokenizer(), ("x",), text_of=text_of)(_records({"a": 1}, {"skip": 1}, {"a": 2}))
    assert byte_tokenizer().decode(chunk.arrays["x"]) == "x: 1x: 2"
    assert chunk.skipped == [("marked to be skipped", "a.jsonl:2")]
    work = TextWork(byte_tokenizer(), text_of=TextColumn("body"))
    assert work.keys == ("text",) and byte_tokenizer().decode(work(_records({"body": "b"})).arrays["text"]) == "b"


BAD = {
    "missing": ({"txt": "a"}, "a.jsonl:2: the record has no key 'text'", "bad record: missing key 'text'"),
    "null": ({"text": None}, "a.jsonl:2: key 'text': expected text, found null", "bad record: key 'text' is not text"),
    "number": ({"text": 3}, "a.jsonl:2: key 'text': expected text, found int 3", "bad record: key 'text' is not text"),
    "list": ({"text": ["a"]}, "a.jsonl:2: key 'text': expected text, found list", "bad record: key 'text' is not text"),
    "surrogate": (
        {"text": "\ud800"},
        "a.jsonl:2: key 'text': the text holds half of a surrogate pair",
        "bad record: key 'text' holds half of a surrogate pair",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_records(name):
    row, message, reason = BAD[name]
    records = _records({"text": "one"}, row, {"text": "two"})
    with pytest.raises(UserError) as error:
        TextWork(byte_tokenizer())(records)
    assert str(error.value).startswith(message)
    chunk = TextWork(byte_tokenizer(), on_bad_record="skip")(records)
    assert chunk.skipped == [(reason, "a.jsonl:2")] and chunk.num_records == 3
    assert byte_tokenizer().decode(chunk.arrays["text"]) == "onetwo"


def test_texts_that_give_no_token():
    backend = byte_level_bpe("</s>", normalizer=normalizers.Replace("x", ""))
    chunk = TextWork(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"), append_eod=True)(
        _texts("xx", "a")
    )
    assert chunk.skipped == [(NO_TOKEN, "a.jsonl:1")] and chunk.lengths["text"].tolist() == [2]


def test_options_that_do_not_fit():
    with pytest.raises(UserError, match="no eos token to append"):
        TextWork(byte_tokenizer(eos_token=None), append_eod=True)
    with pytest.raises(UserError, match="neither a pad nor an eos token"):
        TextWork(byte_tokenizer(eos_token=None), pad_to_multiple_of=2)
    with pytest.raises(UserError, match=r"pieces of 10 tokens, which is no multiple of pad_to_multiple_of \(4\)"):
        TextWork(byte_tokenizer(), piece_length=10, pad_to_multiple_of=4)


@pytest.fixture
def punkt(tmp_path, monkeypatch):
    """Punkt data in the layout that nltk reads, with two abbreviations."""
    nltk = pytest.importorskip("nltk")
    folder = tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    files = {"abbrev_types.txt": "dr\nmr", "collocations.tab": "", "sent_starters.txt": "", "ortho_context.tab": ""}
    for name, content in files.items():
        (folder / name).write_text(content)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk_data")])


STORY = ["Dr. Foo met Mr. Bar.", "They spoke!", "Did it rain?", "No end"]


def test_sentences(punkt):
    tokenizer = TOKENIZERS["begin"]
    records = _texts(" " + STORY[0] + "\n\n" + " ".join(STORY[1:]) + "\n", "", "One sentence.")
    for keep, ends in ((False, ("", "", "", "")), (True, ("\n\n", " ", " ", "\n"))):
        work = TextWork(tokenizer, append_eod=True, split_sentences=True, keep_newlines=keep)
        assert not work.runs_in_threads
        chunk = work(records)
        found = [tokenizer.decode(ids) for ids in _sequences(chunk)]
        first = (" " if keep else "") + STORY[0] + ends[0]
        middle = [sentence + end for sentence, end in zip(STORY[1:], ends[1:], strict=True)]
        assert found == ["<s>" + first, *middle[:-1], middle[-1] + "</s>", "<s>One sentence.</s>"]
        assert chunk.document_sizes["text"].tolist() == [4, 1]
        assert chunk.skipped == [(EMPTY_TEXT, "a.jsonl:2")]
    whole = "".join(text for text in found).replace("<s>", "").replace("</s>", "")
    assert whole == records[0].data["text"] + "One sentence."


def test_sentences_in_pieces_and_padded(punkt):
    work = TextWork(byte_tokenizer(), split_sentences=True, piece_length=4, pad_to_multiple_of=4)
    chunk = work(_texts("abcdefg. Xy.", "Z"))
    assert [byte_tokenizer().decode(ids) for ids in _sequences(chunk)] == [
        *("abcd", "efg.", "Xy.</s>"),
        "Z</s></s></s>",
    ]
    assert chunk.document_sizes["text"].tolist() == [3, 1]


def test_what_sentences_need(monkeypatch, tmp_path):
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="needs nltk's data `punkt_tab`, which is not on this machine; install it with"):
        TextWork(byte_tokenizer(), split_sentences=True)
    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", None)
    with pytest.raises(UserError, match="needs the package nltk"):
        TextWork(byte_tokenizer(), split_sentences=True)
