"""The interface of all commands: texts in, texts out."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.generation import Completion, Sampling
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from tests.support.tokenizers import byte_tokenizer
from tests.support.toys import build_toy
from tests.tasks.inference.plain_backend import PlainBackend

PROMPTS = ["a longer prompt, this one", "日本 🙂", "x", "another prompt\n", "a longer prompt, this one too"]
NEW = 16


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(["<|end|>", "<|tool|>"])


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return build_toy("llama", vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=96, seed=4).eval()


@pytest.fixture
def lm(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> CausalLM:
    return CausalLM(PlainBackend(model), as_tokenizer(tokenizer), stop_ids=frozenset(), batch_size=2, description="toy")


def reference(model: PreTrainedModel, prompt: Sequence[int], **options: object) -> list[int]:
    tokens = torch.tensor([prompt])
    given = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **given)
    return found[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def answers(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [reference(model, tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]


def test_answers_come_in_the_order_of_the_prompts_and_are_told_of_as_they_end(
    lm: CausalLM, tokenizer: PreTrainedTokenizerFast, answers: list[list[int]]
) -> None:
    limits = [NEW, 3, 9, 1, 5]
    requests = [lm.request(prompt, max_new_tokens=limit) for prompt, limit in zip(PROMPTS, limits, strict=True)]
    for batch_size in (None, 1, 4):
        told: dict[int, Completion] = {}
        found = lm.generate(requests, batch_size=batch_size, on_done=told.__setitem__)
        assert [list(item.token_ids) for item in found] == [
            ids[:limit] for ids, limit in zip(answers, limits, strict=True)
        ]
        assert [item.text for item in found] == [
            tokenizer.decode(item.token_ids, skip_special_tokens=True) for item in found
        ]
        assert [told[place] for place in range(len(requests))] == found
        cache = lm.backend.caches[-1]
        assert (cache.slots, cache.length) == (batch_size or 2, max(len(r.prompt) + r.max_new_tokens for r in requests))
        # The longest begin, and the first to end is told of first.
        assert list(told) != list(range(len(requests)))
    assert lm.generate([]) == []


def test_tokens_are_those_of_transformers_and_special_ones_have_no_text(
    lm: CausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = "naïve <|end|>"
    assert lm.encode(text) == tokenizer(text)["input_ids"]
    assert lm.decode(lm.encode(text)) == "naïve "
    assert lm.request(text, max_new_tokens=1).prompt == tuple(lm.encode(text))
    assert lm.request([5, 6], max_new_tokens=1).prompt == (5, 6)
    assert lm.request("", max_new_tokens=1).prompt == (tokenizer.bos_token_id,)


def test_stop_words_that_are_special_tokens_stop_as_tokens(lm: CausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    request = lm.request("a", max_new_tokens=4, stop=["<|end|>", "a", "", "a"])
    # A letter is a token as well here, but its text is seen.
    assert request.stop_ids == {end}
    assert request.stop_strings == ("<|end|>", "a")


def test_answers_stop_at_tokens_and_strings(
    lm: CausalLM, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, answers: list[list[int]]
) -> None:
    """Against the whole answer of transformers, cut. Strings go over the borders of tokens, here of bytes."""
    whole = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    strings = [next(iter(re.findall(r"[^\ufffd]{2}", text[3:])), text[4:6]) for text in whole]
    requests = [
        lm.request(prompt, max_new_tokens=NEW, stop=["never", string])
        for prompt, string in zip(PROMPTS, strings, strict=True)
    ]
    found = lm.generate(requests, batch_size=3)
    for item, text, string in zip(found, whole, strings, strict=True):
        assert string in text
        assert (item.text, item.finish_reason) == (text.split(string)[0], "stop")
    stopping = CausalLM(lm.backend, lm.tokenizer, stop_ids=frozenset({answers[0][4], answers[1][2]}))
    for prompt, item in zip(
        PROMPTS, stopping.generate([stopping.request(prompt, max_new_tokens=NEW) for prompt in PROMPTS]), strict=True
    ):
        expected = reference(model, tokenizer(prompt)["input_ids"], eos_token_id=sorted(stopping.stop_ids))
        has_stopped = expected[-1] in stopping.stop_ids
        assert list(item.token_ids) == expected[: len(expected) - has_stopped]
        assert item.finish_reason == ("stop" if has_stopped else "length")


def test_streams_end_with_the_whole_answer(lm: CausalLM) -> None:
    sampling = Sampling(do_sample=True, temperature=1.3, seed=8)
    for prompt in PROMPTS[:3]:
        request = lm.request(prompt, max_new_tokens=NEW, sampling=sampling)
        parts = list(lm.stream(request))
        assert [len(item.token_ids) for item in parts] == list(range(1, NEW + 1))
        assert [item.finish_reason for item in parts] == [None] * (NEW - 1) + ["length"]
        assert all(parts[-1].text.startswith(item.text) for item in parts)
        assert parts[-1] == lm.generate([request])[0]


def test_a_stream_that_nobody_reads_on_leaves_no_trace(lm: CausalLM, answers: list[list[int]]) -> None:
    first = lm.stream(lm.request(PROMPTS[0], max_new_tokens=NEW))
    next(first)
    first.close()
    for prompt, expected in zip(PROMPTS, answers, strict=True):
        assert list(list(lm.stream(lm.request(prompt, max_new_tokens=NEW)))[-1].token_ids) == expected
    assert len(lm.backend.caches) == 1
    # Two at once: the second has a cache of its own.
    one, other = (lm.stream(lm.request(prompt, max_new_tokens=NEW)) for prompt in PROMPTS[:2])
    pairs = list(zip(one, other, strict=True))
    assert [list(item.token_ids) for item in pairs[-1]] == answers[:2]


def test_a_conversation_is_computed_once(lm: CausalLM) -> None:
    request = lm.request("the first turn", max_new_tokens=6)
    answer = list(lm.stream(request))[-1]
    before = lm.backend.num_tokens
    turn = [*request.prompt, *answer.token_ids, *lm.encode(" and on")]
    list(lm.stream(lm.request(turn, max_new_tokens=2)))
    assert lm.backend.num_tokens - before == len(lm.encode(" and on")) + 2


def test_answers_end_where_the_model_does(lm: CausalLM, model: PreTrainedModel) -> None:
    ids = [7] * 90
    (item,) = lm.generate([lm.request(ids, max_new_tokens=50)])
    assert list(item.token_ids) == reference(model, ids, max_new_tokens=6)
    assert item.finish_reason == "length"
    assert lm.max_length == 96


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([7] * 96, {}, "96 tokens, and the model has 96 positions"),
        ("a" * 200, {}, "200 tokens"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ("a", {"sampling": Sampling(top_p=2.0)}, "top-p is 2.0"),
    ],
)
def test_what_cannot_be_asked(lm: CausalLM, prompt: str | list[int], options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lm.request(prompt, **{"max_new_tokens": 1, **options})


def test_an_empty_prompt_needs_a_token_to_begin_with(model: PreTrainedModel) -> None:
    tokenizer = as_tokenizer(byte_tokenizer(bos_token=None))
    with pytest.raises(UserError, match="the prompt is empty"):
        CausalLM(PlainBackend(model), tokenizer, stop_ids=frozenset()).request("", max_new_tokens=1)


def test_likelihoods_are_those_of_one_pass_over_each_text(
    lm: CausalLM, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    contexts, continuations = ["the answer is", "the answer is", "so"], [" A", " B", " it goes"]
    told: dict[int, object] = {}
    found = lm.loglikelihood(contexts, continuations, on_done=told.__setitem__)
    for context, continuation, item in zip(contexts, continuations, found, strict=True):
        ids = torch.tensor([tokenizer.encode(context + continuation)])
        count = len(continuation)
        with torch.no_grad():
            logprobs = model(ids).logits[0, -count - 1 : -1].log_softmax(dim=-1)
        assert item.logprob == pytest.approx(float(logprobs.gather(-1, ids[0, -count:, None]).sum()), abs=1e-4)
        assert item.tokens == count
    assert [told[place] for place in range(3)] == found
