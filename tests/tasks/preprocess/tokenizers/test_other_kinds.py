"""Tokenizers that come in other files than tokenizer.json, and those that transformers has loaded."""

import importlib.util
import io
import json
import sys

import numpy as np
import pytest
import sentencepiece
from tokenizers import AddedToken
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.tokenizers import TokenizerOptions, as_tokenizer, load_tokenizer
from mindspeed_llm.tasks.preprocess.tokenizers.rust_tokenizer import RustTokenizer
from tests.support.tokenizer_files import SENTENCES, TEXTS, byte_level_bpe, llama_like, random_texts
from tests.tasks.preprocess.tokenizers.test_hf_files import assert_equal


def _load(kind, **options):
    return load_tokenizer(TokenizerOptions(kind=kind, **{name: str(value) for name, value in options.items()}))


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 5), model_writer=model, vocab_size=420, model_type="bpe", byte_fallback=True,
        pad_id=3, minloglevel=2,
    )  # fmt: skip
    file = tmp_path_factory.mktemp("model") / "tokenizer.model"
    file.write_bytes(model.getvalue())
    return file


def test_sentencepiece_model(model_file):
    ours = _load("GPTSentencePieceTokenizer", model=model_file)
    authority = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    texts = TEXTS + random_texts(50)
    expected = [authority.encode(text) for text in texts]
    assert [ours.encode(text) for text in texts] == expected
    for special in (True, False):
        assert ours.encode_batch(texts, add_special_tokens=special) == expected
        ids, lengths = ours.encode_flat(texts, add_special_tokens=special)
        assert lengths.tolist() == list(map(len, expected)) and ids.tolist() == [i for item in expected for i in item]
    assert [ours.decode(ids) for ids in expected] == [authority.decode(ids) for ids in expected]
    assert ours.decode([1, *authority.encode("a b"), 2, 1]) == "<s>a b</s><s>"
    assert ours.decode(np.array([1, *authority.encode("a b"), 2]), skip_special_tokens=True) == "a b"
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<s>", "</s>", "<pad>")
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 3)
    assert len(ours) == len(ours.get_vocab()) == 420 and ours.get_vocab()["</s>"] == 2
    with pytest.raises(UserError, match="no chat template; name a template with --prompt-type"):
        ours.apply_chat_template([])


def test_sentencepiece_model_of_a_directory(model_file):
    by_folder = _load("GPTSentencePieceTokenizer", name_or_path=model_file.parent)
    assert by_folder.identity() == _load("GPTSentencePieceTokenizer", model=model_file).identity()
    # For the same directory, PretrainedFromHF is what transformers makes of it.
    from transformers import AutoTokenizer

    assert_equal(
        _load("PretrainedFromHF", name_or_path=model_file.parent), AutoTokenizer.from_pretrained(model_file.parent)
    )


def test_mistakes_about_sentencepiece(tmp_path):
    with pytest.raises(UserError, match=r"needs --tokenizer-model .* or --tokenizer-name-or-path"):
        _load("GPTSentencePieceTokenizer")
    with pytest.raises(UserError, match=r"--tokenizer-model .*none\.model does not exist"):
        _load("GPTSentencePieceTokenizer", model=tmp_path / "none.model")
    (tmp_path / "bad.model").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"bad\.model is not a sentencepiece model"):
        _load("GPTSentencePieceTokenizer", model=tmp_path / "bad.model")


def test_gpt2_files(tmp_path):
    backend = byte_level_bpe()
    backend.model.save(str(tmp_path))
    vocab = json.loads((tmp_path / "vocab.json").read_text()) | {"<|endoftext|>": backend.get_vocab_size()}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    files = {"vocab_file": tmp_path / "vocab.json", "merge_file": tmp_path / "merges.txt"}
    ours = _load("GPT2BPETokenizer", **files)
    assert isinstance(ours, RustTokenizer) and ours.eos_token_id == ours.bos_token_id == len(vocab) - 1
    assert_equal(ours, GPT2Tokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")))
    assert _load("GPT2BPETokenizer", **files).identity() == ours.identity()
    with pytest.raises(UserError, match="GPT2BPETokenizer needs --merge-file"):
        _load("GPT2BPETokenizer", vocab_file=tmp_path / "vocab.json")
    with pytest.raises(UserError, match=r"--merge-file .*none does not exist"):
        _load("GPT2BPETokenizer", vocab_file=tmp_path / "vocab.json", merge_file=tmp_path / "none")
    (tmp_path / "merges.txt").write_text("no merge in it\n")
    with pytest.raises(UserError, match=r"are not the vocabulary .* of one BPE tokenizer"):
        _load("GPT2BPETokenizer", **files)


def test_unknown_kind():
    with pytest.raises(UserError, match="--tokenizer-type 'BertTokenizer' is unknown; expected one of"):
        _load("BertTokenizer")


def test_magistral_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mistral_common", None)
    with pytest.raises(UserError, match="needs the package mistral-common, which is not installed"):
        _load("MagistralTokenizer", name_or_path=tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("mistral_common") is None, reason="needs the package mistral-common")
def test_magistral(tmp_path):
    from tests.support.tekken import write_tekken

    write_tekken(tmp_path / "tekken.json")
    ours = _load("MagistralTokenizer", name_or_path=tmp_path)
    texts = [text for text in TEXTS if text]
    ids = ours.encode_batch(texts)
    assert all(item[0] == ours.bos_token_id for item in ids)
    assert [ours.decode(item, skip_special_tokens=True) for item in ids] == texts
    assert ours.decode(ids[0]) == "<s>" + texts[0]
    assert [ours.encode(text) for text in texts] == [item[1:] for item in ids]
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<s>", "</s>", "<pad>")


class _Shouting(PreTrainedTokenizerFast):
    """A class with an encoding step of its own."""

    def _encode_plus(self, text, **options):
        text = text.upper() if isinstance(text, str) else [item.upper() for item in text]
        return super()._encode_plus(text, **options)


@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, _Shouting])
def test_tokenizers_of_transformers(kind):
    authority = kind(tokenizer_object=llama_like(), bos_token="<s>", eos_token="</s>")
    ours = as_tokenizer(authority)
    assert as_tokenizer(ours) is ours
    assert ours.runs_in_threads == (kind is PreTrainedTokenizerFast)
    assert_equal(ours, authority)


def test_what_is_set_after_wrapping_counts():
    authority = PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe("<s>", "</s>", "<x>"), eos_token="</s>")
    ours = as_tokenizer(authority)
    before = ours.identity()
    authority.eos_token = "<x>"
    assert ours.eos_token_id == authority.eos_token_id and ours.identity() != before
    before = ours.identity()
    authority.add_tokens([AddedToken("<new>")])
    assert ours.encode_flat(["a<new>"])[0].tolist() == authority.encode("a<new>") and ours.identity() != before
