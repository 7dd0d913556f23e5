"""OpenAI's own client against a toy Llama: the same answers as transformers gives, however they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import openai
import pytest
import torch

from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.generation import Sampling
from mindspeed_llm.tasks.inference.serve import scoring
from mindspeed_llm.tasks.inference.serve.service import Service
from tests.tasks.inference.serve.serving import MODEL, SLOTS, assert_alike, client_of, generated, serving, toy_lm

PROMPTS = ["Hello, world", "2 + 2 =", "Once upon a time, in a land far away,", "世界"]
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
CHAT_PROMPT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return toy_lm()


@pytest.fixture(scope="module")
def service(lm: CausalLM) -> Iterator[Service]:
    with serving(lm) as found:
        yield found


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with client_of(service) as found:
        yield found


def test_the_model_is_listed(client: openai.OpenAI, lm: CausalLM) -> None:
    [model] = client.models.list()
    assert model == client.models.retrieve(MODEL)
    assert (model.id, model.max_model_len) == (MODEL, lm.max_length)


@pytest.mark.parametrize("as_ids", [False, True])
def test_greedy_completions_are_those_of_transformers(client: openai.OpenAI, lm: CausalLM, as_ids: bool) -> None:
    prompts = [lm.encode(prompt) for prompt in PROMPTS]
    expected = [generated(lm, prompt, 24) for prompt in prompts]
    found = client.completions.create(
        model=MODEL, prompt=prompts if as_ids else PROMPTS, max_tokens=24, temperature=0, logprobs=0
    )
    assert [choice.index for choice in found.choices] == list(range(len(PROMPTS)))
    assert [choice.text for choice in found.choices] == [lm.decode(ids) for ids in expected]
    assert [len(choice.logprobs.tokens) for choice in found.choices] == list(map(len, expected))
    assert {choice.finish_reason for choice in found.choices} <= {"stop", "length"}
    counts = (sum(map(len, prompts)), sum(map(len, expected)))
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (
        *counts,
        sum(counts),
    )
    one = client.completions.create(model=MODEL, prompt=prompts[0], max_tokens=24, temperature=0)
    assert one.choices[0].text == found.choices[0].text and one.choices[0].logprobs is None


def test_a_chat_is_asked_in_the_template(client: openai.OpenAI, lm: CausalLM) -> None:
    prompt = lm.encode(CHAT_PROMPT)
    expected = generated(lm, prompt, 30)
    found = client.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=30, temperature=0)
    [choice] = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", lm.decode(expected))
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(prompt), len(expected))
    assert choice.finish_reason == ("length" if len(expected) == 30 else "stop")
    # Without a limit the answer ends with the context.
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert whole.choices[0].message.content == lm.decode(generated(lm, prompt, lm.max_length - len(prompt)))


def test_streams_say_the_same_as_whole_answers(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "max_tokens": 40, "temperature": 1.3, "seed": 5, "n": 2, "logprobs": 2}
    whole = client.completions.create(prompt=PROMPTS[:2], **asked)
    chunks = list(
        client.completions.create(prompt=PROMPTS[:2], stream=True, stream_options={"include_usage": True}, **asked)
    )
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert all(chunk.usage is None for chunk in chunks[:-1]) and len({chunk.id for chunk in chunks}) == 1
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert len(parts) > 10
        assert "".join(part.text for part in parts) == choice.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert_alike(list(chain(*(getattr(part.logprobs, name) for part in parts))), getattr(choice.logprobs, name))
        reasons = [part.finish_reason for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [choice.finish_reason]


def test_streamed_chats_say_the_same_as_whole_ones(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 30, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(top_logprobs=3, **asked).choices[0]
    parts = [chunk.choices[0] for chunk in client.chat.completions.create(top_logprobs=3, stream=True, **asked)]
    assert parts[0].delta.role == "assistant"
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    streamed = chain(*(part.logprobs.content for part in parts if part.logprobs))
    assert_alike([token.model_dump() for token in streamed], [token.model_dump() for token in whole.logprobs.content])
    assert parts[-1].finish_reason == whole.finish_reason


def test_samples_follow_from_the_seed(client: openai.OpenAI, lm: CausalLM) -> None:
    def texts(**options: object) -> list[str]:
        found = client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=20, n=3, **options)
        return [choice.text for choice in found.choices]

    body = {"top_k": 40, "repetition_penalty": 1.2}
    first = texts(seed=7, temperature=0.8, top_p=0.9, extra_body=body)
    assert first == texts(seed=7, temperature=0.8, top_p=0.9, extra_body=body) and len(set(first)) == 3
    sampling = Sampling(do_sample=True, temperature=0.8, top_p=0.9, top_k=40, repetition_penalty=1.2, seed=7)
    request = lm.request(PROMPTS[0], max_new_tokens=20, sampling=sampling)
    others = [replace(request, sampling=replace(sampling, seed=seed)) for seed in (7, 8, 9)]
    assert [answer.text for answer in toy_lm().generate(others)] == first
    # Without a seed each request has one of its own; no share of the probability is the first token.
    assert texts() != texts()
    assert texts(top_p=0) == texts(temperature=0)


def test_logprobs_are_those_of_the_model(client: openai.OpenAI, lm: CausalLM) -> None:
    prompt = lm.encode(PROMPTS[0])
    ids = generated(lm, prompt, 12)
    logits = lm.backend.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
    values, tokens = logits.topk(4)
    asked = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    found = client.completions.create(prompt=PROMPTS[0], logprobs=4, **asked).choices[0].logprobs
    assert_alike(found.token_logprobs, logits.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist())
    for text, logprob, top, best in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, values.tolist(), strict=True
    ):
        assert top[text] == logprob
        assert max(top.values()) == pytest.approx(best[0], abs=1e-4)
    # As chat every alternative has an entry of its own, whatever its text.
    chat = client.chat.completions.create(messages=QUESTION, logprobs=True, top_logprobs=4, **asked).choices[0]
    prompt = lm.encode(CHAT_PROMPT)
    ids = generated(lm, prompt, 12)
    logits = lm.backend.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
    values, tokens = logits.topk(4)
    for token, best, best_ids in zip(chat.logprobs.content, values.tolist(), tokens.tolist(), strict=True):
        assert_alike([top.logprob for top in token.top_logprobs], best)
        for top, of_token in zip(token.top_logprobs, best_ids, strict=True):
            assert top.bytes is None or bytes(top.bytes).decode() in lm.tokenizer.decode([of_token])


@pytest.mark.parametrize("most_logits", [scoring._MOST_LOGITS, 5000])
@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_prompts_can_be_scored_as_lm_eval_does(
    client: openai.OpenAI, lm: CausalLM, max_tokens: int, most_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request and the reading of its answer are those of lm-eval's `local-completions`."""
    monkeypatch.setattr(scoring, "_MOST_LOGITS", most_logits)  # the prompts are then taken in pieces
    pairs = [("The capital of France is", " Paris"), ("世", "界"), ("a" * 90, "b" * 30)]
    contexts = [lm.encode(context) for context, _ in pairs]
    texts = [lm.encode(context + rest) for context, rest in pairs]
    asked = {"model": MODEL, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "echo": True, "seed": 1234}
    found = client.completions.create(prompt=texts, **asked)
    behind = -max_tokens or None
    for choice, context, text in zip(found.choices, contexts, texts, strict=True):
        logits = lm.backend.model(torch.tensor([text])).logits[0].log_softmax(dim=-1)[len(context) - 1 : -1]
        rest = torch.tensor(text[len(context) :])
        expected = logits.gather(1, rest[:, None]).sum().item()
        is_greedy = bool((logits.argmax(dim=-1) == rest).all())
        logprobs = choice.logprobs.token_logprobs[len(context) : behind]
        top = choice.logprobs.top_logprobs[len(context) : behind]
        assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
        assert len(logprobs) == len(rest)
        assert sum(logprobs) == pytest.approx(expected, abs=1e-4)
        assert all(own == max(values.values()) for own, values in zip(logprobs, top, strict=True)) == is_greedy
        answer = generated(lm, text, max_tokens) if max_tokens else []
        assert choice.text == lm.decode(text) + lm.decode(answer)


def test_what_is_most_probable_counts_as_greedy(client: openai.OpenAI, lm: CausalLM) -> None:
    context = lm.encode(PROMPTS[0])
    text = context + generated(lm, context, 5)
    found = client.completions.create(model=MODEL, prompt=text, temperature=0, max_tokens=1, logprobs=1, echo=True)
    logprobs = found.choices[0].logprobs
    behind = slice(len(context), -1)
    assert [max(top.values()) for top in logprobs.top_logprobs[behind]] == logprobs.token_logprobs[behind]
    streamed = client.completions.create(
        model=MODEL, prompt=PROMPTS[0], max_tokens=3, temperature=0, echo=True, stream=True
    )
    whole = client.completions.create(model=MODEL, prompt=PROMPTS[0], max_tokens=3, temperature=0, echo=True)
    text = "".join(chunk.choices[0].text for chunk in streamed)
    assert text == whole.choices[0].text == PROMPTS[0] + lm.decode(generated(lm, context, 3))


def test_requests_at_once_share_batches_and_change_no_answer(client: openai.OpenAI, lm: CausalLM) -> None:
    prompts = [f"{prompt} {number}" for number, prompt in enumerate(PROMPTS * 2)]
    before = len(lm.backend.batches)
    together = threading.Barrier(len(prompts))

    def ask(prompt: str) -> str:
        together.wait(10)
        found = client.completions.create(model=MODEL, prompt=prompt, max_tokens=30, temperature=0)
        return found.choices[0].text

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers == [lm.decode(generated(lm, lm.encode(prompt), 30)) for prompt in prompts]
    sizes = [len(batch.slots) for batch in lm.backend.batches[before:]]
    assert max(sizes) == SLOTS and len(sizes) < sum(sizes) / 2
