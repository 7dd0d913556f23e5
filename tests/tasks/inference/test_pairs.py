"""Borders between contexts and continuations: by hand, and against lm-eval's own rule where it is installed."""

from __future__ import annotations

import itertools

import pytest
from transformers import PreTrainedTokenizerFast

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.pairs import Pair, Row, encode_pairs, prefix_token_id, to_row
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from tests.support import tokenizer_files
from tests.support.tokenizers import byte_tokenizer


def _wrapped(backend, **tokens) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


def _byte_level() -> PreTrainedTokenizerFast:
    return _wrapped(tokenizer_files.byte_level_bpe("<|end|>", "<s>"), eos_token="<|end|>")


def _llama() -> PreTrainedTokenizerFast:
    return _wrapped(tokenizer_files.llama_like(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _ends_itself() -> PreTrainedTokenizerFast:
    backend = tokenizer_files.byte_level_bpe("<s>", "</s>")
    tokenizer_files.begin(backend, "<s>", "</s>")
    return _wrapped(backend, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {
    "byte_level": _byte_level,
    "qwen": lambda: _wrapped(tokenizer_files.qwen_like("<|end|>"), eos_token="<|end|>"),
    "llama": _llama,
    "unigram": lambda: _wrapped(tokenizer_files.unigram(), bos_token="<s>", eos_token="</s>", unk_token="<unk>"),
    "ends_itself": _ends_itself,
}
CONTEXTS = [
    "",
    "The quick",
    "The quick ",
    "over the\n\n",
    "the",
    "jump",
    "nai",
    "人工",
    "<s>The quick",
    "<s>",
    "<|end|>x",
]
CONTINUATIONS = [" brown fox", "brown", "s", "ve café", "\nn", " A", "智能模型", "<s> x", "</s>", " "]


def _theirs(tokenizer: PreTrainedTokenizerFast):
    """lm-eval's model class for transformers with this tokenizer and no model: only what encodes is called."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra: eval)")
    from lm_eval.models.huggingface import HFLM

    class Encoder(HFLM):
        def __init__(self) -> None:
            self.tokenizer, self.add_bos_token, self.backend = tokenizer, None, "causal"
            self.custom_prefix_token_id, self.enable_thinking = None, False

        def _loglikelihood_tokens(self, requests, **_):
            return requests

    return Encoder()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_are_those_of_lm_eval(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    theirs = _theirs(tokenizer)
    from lm_eval.api.instance import Instance

    compared = 0
    for context, continuation in itertools.product(CONTEXTS, CONTINUATIONS):
        asked = Instance(request_type="loglikelihood", doc={}, arguments=(context, continuation), idx=0)
        ((_, before, behind),) = theirs.loglikelihood([asked], disable_tqdm=True)
        if not before or not behind:  # lm-eval stops at an assertion
            continue
        assert encode_pairs(as_tokenizer(tokenizer), [context], [continuation]) == [
            Pair(context=tuple(before), continuation=tuple(behind))
        ], (context, continuation)
        compared += 1
    assert compared > 90


def _pair(tokenizer: PreTrainedTokenizerFast, context: str, continuation: str) -> tuple[list[str], list[str]]:
    (pair,) = encode_pairs(as_tokenizer(tokenizer), [context], [continuation])
    return tokenizer.convert_ids_to_tokens(pair.context), tokenizer.convert_ids_to_tokens(pair.continuation)


def test_white_space_goes_to_the_continuation() -> None:
    assert _pair(_byte_level(), "the ", "lazy dog") == (["the"], ["Ġlazy", "Ġdog"])
    assert _pair(_byte_level(), "the", " lazy dog") == (["the"], ["Ġlazy", "Ġdog"])


def test_a_token_over_the_border_leaves_the_context_as_it_is() -> None:
    tokenizer = _byte_level()
    assert tokenizer.tokenize("quick brown") == ["qu", "ick", "Ġbrown"]
    # "i" and "ck" meet in one token of the whole text, which the context does not have.
    assert _pair(tokenizer, "qui", "ck brown") == (["qu", "i"], ["Ġbrown"])


def test_begin_tokens_stand_once() -> None:
    tokenizer = _llama()
    assert _pair(tokenizer, "the", " lazy")[0][0] == "<s>"
    assert _pair(tokenizer, "<s>the", " lazy")[0].count("<s>") == 1
    assert _pair(tokenizer, "", "the lazy")[0] == ["<s>"]
    assert _pair(tokenizer, "", "<s>the lazy")[0] == ["<s>"]
    assert "<s>" not in _pair(tokenizer, "", "<s>the lazy")[1]
    # White space alone is no context.
    assert _pair(_byte_level(), " ", "the") == (["<|end|>"], ["Ġthe"])
    assert _pair(_byte_level(), "", "the") == (["<|end|>"], ["the"])


def test_order_and_repetition_are_kept() -> None:
    tokenizer = as_tokenizer(_llama())
    contexts, continuations = ["the", "", "the", "over "], [" lazy", "dog", " lazy", "it"]
    together = encode_pairs(tokenizer, contexts, continuations)
    assert together == [
        encode_pairs(tokenizer, [context], [continuation])[0]
        for context, continuation in zip(contexts, continuations, strict=True)
    ]
    assert encode_pairs(tokenizer, [], []) == []


def test_what_has_no_likelihood_is_refused() -> None:
    tokenizer = as_tokenizer(byte_tokenizer(bos_token=None, eos_token=None))
    with pytest.raises(UserError, match="neither a bos_token nor an eos_token"):
        prefix_token_id(tokenizer)
    with pytest.raises(UserError, match="neither a bos_token nor an eos_token"):
        encode_pairs(tokenizer, [""], ["a"])
    assert encode_pairs(tokenizer, ["b"], ["a"]) == [Pair(context=(65,), continuation=(64,))]
    with pytest.raises(UserError, match=r"continuation '' of a context that ends in 'b' adds no token"):
        encode_pairs(tokenizer, ["b"], [""])
    with pytest.raises(UserError, match="adds no token"):
        encode_pairs(as_tokenizer(_byte_level()), ["s"], ["n"])


def test_long_contexts_lose_their_beginning() -> None:
    pair = Pair(context=(1, 2, 3, 4), continuation=(5, 6))
    assert to_row(pair, 8) == to_row(pair, 5) == Row(inputs=(1, 2, 3, 4, 5), targets=(5, 6))
    assert to_row(pair, 4) == Row(inputs=(2, 3, 4, 5), targets=(5, 6))
    assert to_row(pair, 2) == Row(inputs=(4, 5), targets=(5, 6))
    with pytest.raises(UserError, match="A continuation has 2 tokens, the model has 1 positions"):
        to_row(pair, 1)
