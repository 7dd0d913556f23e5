"""gigatoken gives the ids of `tokenizers` wherever it is used, and is left alone everywhere else."""

import importlib.util
import threading
import time

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from mindspeed_llm.tasks.preprocess.tokenizers import gigatoken_path, hf_files
from mindspeed_llm.tasks.preprocess.tokenizers.gigatoken_path import GigatokenPath
from mindspeed_llm.tasks.preprocess.tokenizers.rust_tokenizer import RustTokenizer
from tests.support.tokenizer_files import (
    SENTENCES,
    TEXTS,
    begin,
    byte_level_bpe,
    changed,
    llama_like,
    qwen_like,
    random_texts,
    wordpiece,
)

needs_gigatoken = pytest.mark.skipif(importlib.util.find_spec("gigatoken") is None, reason="needs gigatoken")
ALL_TEXTS = [*TEXTS, *SENTENCES, *random_texts(300), "e\u0301 decomposed", "newer letters: \ua7d2's \U0001e6db's", ""]
LLAMA3_WORDS = hf_files._QWEN_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|")


def _with_words(pattern, vocab_size=2000):
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    steps = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return byte_level_bpe("<s>", "<|endoftext|>", pre_tokenizer=steps, vocab_size=vocab_size)


def _around(backend, **tokens):
    begin(backend, **tokens)
    return backend


FIT = {
    "gpt2": lambda: byte_level_bpe("<s>", "</s>", "<|endoftext|>", vocab_size=2000),
    "llama3": lambda: _with_words(LLAMA3_WORDS),
    "qwen": lambda: qwen_like("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "begin token": lambda: _around(byte_level_bpe("<s>", "</s>"), bos="<s>"),
    "begin and end token": lambda: _around(byte_level_bpe("<s>", "</s>"), bos="<s>", eos="</s>"),
}


def _byte_missing(description):
    """Leave the last byte letter out of the vocabulary, as vocabularies trained without the whole alphabet do."""
    letter = max(pre_tokenizers.ByteLevel.alphabet())
    vocab = description["model"]["vocab"]
    vocab["unused"] = vocab.pop(letter)
    description["model"]["merges"] = [pair for pair in description["model"]["merges"] if letter not in "".join(pair)]


def _set(**values):
    return lambda description: description["model"].update(values)


UNFIT = {
    "a byte is missing": lambda: changed(byte_level_bpe(vocab_size=256), _byte_missing),
    "sentencepiece": llama_like,
    "word piece": wordpiece,
    "token that strips": lambda: byte_level_bpe(AddedToken("<s>", lstrip=True)),
    "token of a word": lambda: byte_level_bpe(AddedToken("foo", single_word=True)),
    "space in front": lambda: byte_level_bpe(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "dropout": lambda: changed(byte_level_bpe(), _set(dropout=0.1)),
    "lower case": lambda: byte_level_bpe(normalizer=normalizers.Lowercase()),
    "words of its own": lambda: _with_words(r"[^\s]+|\s+"),
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(gigatoken_path, "FIRST_CHARS", 0)


def _flat(backend, texts, special):
    ids = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=special)]
    return list(map(len, ids)), [token for item in ids for token in item]


@needs_gigatoken
@pytest.mark.parametrize("name", FIT)
def test_same_ids(name):
    backend = FIT[name]()
    path = GigatokenPath(backend)
    for special in (True, False):
        ids, lengths = path.encode_flat(ALL_TEXTS, special)
        assert ids.dtype == lengths.dtype == np.int32
        assert (lengths.tolist(), ids.tolist()) == _flat(backend, ALL_TEXTS, special)
    assert [len(part) for part in path.encode_flat([], True)] == [0, 0]


@needs_gigatoken
def test_all_characters_in_use():
    """Every 23rd code point that Unicode has, where words begin and end; the whole range was compared once."""
    backend = FIT["gpt2"]()
    texts = [f"a{chr(c)}b {chr(c)} 1{chr(c)}\n{chr(c)}'s {chr(c)}" for c in range(0x20, 0x32400, 23) if c >> 11 != 27]
    ids, lengths = GigatokenPath(backend).encode_flat(texts, True)
    assert (lengths.tolist(), ids.tolist()) == _flat(backend, texts, True)


@pytest.mark.parametrize("name", UNFIT)
def test_left_alone(name):
    path = GigatokenPath(UNFIT[name]())
    assert path.encode_flat(["some text"], True) is None
    assert path.encode_flat(["some text"], True) is None


@needs_gigatoken
def test_the_sample_decides(monkeypatch):
    """A library that gives another id anywhere in the sample is not used."""
    backend = FIT["gpt2"]()
    new_encode = GigatokenPath._new_encode

    def wrong_in_one_text(self):
        encode = new_encode(self)
        return lambda text: encode(text.replace("ไ", "x"))

    assert GigatokenPath(backend).encode_flat(["x"], True) is not None
    monkeypatch.setattr(GigatokenPath, "_new_encode", wrong_in_one_text)
    assert GigatokenPath(backend).encode_flat(["x"], True) is None


@needs_gigatoken
def test_texts_that_libraries_may_see_differently_go_to_tokenizers(monkeypatch):
    backend, given = FIT["qwen"](), []
    path = GigatokenPath(backend)
    path.encode_flat([""], True)
    encode = path._encode
    monkeypatch.setattr(path, "_encode", lambda text: given.append(text) or encode(text))
    texts = ["plain", "composed é", "decomposed e\u0301", "不合成", "newer than Python's Unicode \ua7d2", "\U000f0000"]
    ids, lengths = path.encode_flat(texts, True)
    assert given == ["plain", "composed é", "不合成"]
    assert (lengths.tolist(), ids.tolist()) == _flat(backend, texts, True)


@needs_gigatoken
def test_it_is_loaded_anew_when_it_has_grown(monkeypatch):
    backend, loads = FIT["gpt2"](), []
    path = GigatokenPath(backend)
    new_encode = GigatokenPath._new_encode
    monkeypatch.setattr(GigatokenPath, "_new_encode", lambda self: loads.append(1) or new_encode(self))
    first = path.encode_flat(ALL_TEXTS, True)
    path.encode_flat(ALL_TEXTS, True)
    assert len(loads) == 1
    monkeypatch.setattr(gigatoken_path, "_CACHE_BYTES", -1)
    again = path.encode_flat(ALL_TEXTS, True)
    assert len(loads) == 2 and all(map(np.array_equal, first, again))


@needs_gigatoken
def test_small_jobs_do_without_it(monkeypatch):
    monkeypatch.setattr(gigatoken_path, "FIRST_CHARS", 10)
    path = GigatokenPath(FIT["gpt2"]())
    assert path.encode_flat(["123", "456"], True) is None
    assert path.encode_flat(["7890"], True) is not None


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert GigatokenPath(FIT["gpt2"]()).encode_flat(["text"], True) is None


@needs_gigatoken
def test_half_a_surrogate_pair_is_a_mistake_either_way(monkeypatch):
    backend = FIT["gpt2"]()
    for _ in ("gigatoken", "tokenizers"):
        with pytest.raises((ValueError, TypeError)):
            RustTokenizer(backend, content_hash="").encode_flat(["half \ud800"])
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_why_it_is_not_used_is_said_once(monkeypatch, caplog):
    """Also where the second thread has waited for the first to find out."""
    path = gigatoken_path.GigatokenPath(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    monkeypatch.setattr(gigatoken_path, "FIRST_CHARS", 1)
    monkeypatch.setattr(path, "_is_off", False)
    may_load, real = threading.Event(), path._load

    def load():
        may_load.wait(timeout=20)
        real()

    monkeypatch.setattr(path, "_load", load)
    with caplog.at_level("INFO"):
        threads = [threading.Thread(target=path.encode_flat, args=(["a b"], True)) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        may_load.set()
        for thread in threads:
            thread.join(timeout=20)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "the package gigatoken does not fit this tokenizer" in message and "the same ids" in message
