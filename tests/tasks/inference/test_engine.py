"""Continuous batching: the same answers as transformers gives to each prompt alone, whatever shares a batch with it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.adapters.hf import HFBackend
from mindspeed_llm.tasks.inference.backend import Backend
from mindspeed_llm.tasks.inference.engine import Engine
from mindspeed_llm.tasks.inference.generation import Completion, Request, Sampling
from tests.support.toys import build_toy
from tests.tasks.inference.plain_backend import PlainBackend

LENGTHS = (3, 41, 17, 18, 60, 1, 25, 44, 9, 40)
NEW = 12


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_toy("llama", num_hidden_layers=2).eval()


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """Ragged; some begin alike."""
    choose = random.Random(0)
    found = [tuple(choose.randrange(3, 509) for _ in range(length)) for length in LENGTHS]
    found[4] = found[1] + found[4][41:]
    found[7] = found[1][:30] + found[7][30:]
    return found


def reference(model: PreTrainedModel, prompt: Sequence[int], **options: object) -> list[int]:
    """The new tokens of transformers.generate, batch 1, with the token that ends."""
    given = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    tokens = torch.tensor([prompt])
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), use_cache=True, **given)
    return found[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def answers(model: PreTrainedModel, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    return [reference(model, prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def backend(model: PreTrainedModel) -> Backend:
    return HFBackend(model, device=torch.device("cpu"))


@pytest.fixture
def plain(model: PreTrainedModel) -> Iterator[PlainBackend]:
    """One that shares nothing between texts, and notes what is asked of it."""
    hooks = model.lm_head._forward_pre_hooks
    others = list(hooks.items())
    hooks.clear()  # the adapter's
    yield PlainBackend(model)
    hooks.update(others)


def decode(ids: Sequence[int]) -> str:
    """A letter for each token."""
    return "".join(chr(0x4E00 + token) for token in ids)


def run(engine: Engine, requests: Sequence[Request], *, report: bool = False) -> list[Completion]:
    numbers = [engine.add(request, report=report) for request in requests]
    found: dict[int, Completion] = {}
    while engine.busy:
        for number, completion, is_finished in engine.step():
            assert is_finished == (completion.finish_reason is not None)
            assert number not in found, "told of after its end"
            if is_finished:
                found[number] = completion
    return [found[number] for number in numbers]


def ask(prompts: Sequence[tuple[int, ...]], **options: object) -> list[Request]:
    return [Request(prompt=prompt, **{"max_new_tokens": NEW, **options}) for prompt in prompts]


@pytest.mark.parametrize(("kind", "slots"), [("backend", 1), ("backend", 3), ("backend", 8), ("plain", 3)])
def test_greedy_is_that_of_transformers(
    request: pytest.FixtureRequest,
    prompts: list[tuple[int, ...]],
    answers: list[list[int]],
    kind: str,
    slots: int,
) -> None:
    backend = request.getfixturevalue(kind)
    engine = Engine(backend, decode, slots=slots, length=100)
    for _ in range(2):  # the second time slots hold what the first has left
        found = run(engine, ask(prompts))
        assert [list(item.token_ids) for item in found] == answers
        assert all(item.finish_reason == "length" and item.text == decode(item.token_ids) for item in found)


def test_each_answer_ends_by_its_own_rules(
    model: PreTrainedModel, backend: Backend, prompts: list[tuple[int, ...]], answers: list[list[int]]
) -> None:
    """Several end tokens, other limits, the end of the cache."""
    stop = sorted({answers[0][5], answers[1][9], answers[3][0]})
    requests = ask(prompts[:5], stop_ids=frozenset(stop))
    requests += ask(prompts[5:7], max_new_tokens=1) + ask(prompts[7:8], max_new_tokens=1000)
    found = run(Engine(backend, decode, slots=3, length=61), requests)
    reasons = []
    for place, item in enumerate(found[:5]):
        limit = min(NEW, 61 - LENGTHS[place])
        expected = reference(model, prompts[place], eos_token_id=stop, max_new_tokens=limit)
        has_stopped = expected[-1] in stop
        assert list(item.token_ids) == expected[: len(expected) - has_stopped]
        assert item.finish_reason == ("stop" if has_stopped else "length")
        assert len(item.logprobs) == len(item.token_ids)
        reasons.append(item.finish_reason)
    assert set(reasons) == {"stop", "length"}
    assert found[3].token_ids == () and found[3].text == ""
    assert [len(item.token_ids) for item in found[4:]] == [1, 1, 1, 61 - 44]


def test_penalty_is_that_of_transformers(
    model: PreTrainedModel, backend: Backend, prompts: list[tuple[int, ...]], answers: list[list[int]]
) -> None:
    found = run(Engine(backend, decode, slots=2, length=100), ask(prompts, sampling=Sampling(repetition_penalty=1.5)))
    expected = [reference(model, prompt, repetition_penalty=1.5) for prompt in prompts]
    assert [list(item.token_ids) for item in found] == expected != answers


def test_logprobs_are_of_the_models_own_logits(
    model: PreTrainedModel, backend: Backend, prompts: list[tuple[int, ...]]
) -> None:
    """Also where tokens are sampled from others. The reference is one forward pass over the whole text."""
    sampling = Sampling(do_sample=True, temperature=1.7, top_k=40, repetition_penalty=1.2, seed=3)
    requests = ask(prompts[:2], top_logprobs=5) + ask(prompts[2:4], sampling=sampling, top_logprobs=2)
    for request, item in zip(requests, run(Engine(backend, decode, slots=3, length=90), requests), strict=True):
        text = torch.tensor([[*request.prompt, *item.token_ids]])
        with torch.no_grad():
            expected = model(text).logits[0, len(request.prompt) - 1 : -1].log_softmax(dim=-1)
        own = expected.gather(-1, text[0, len(request.prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(item.logprobs), own, atol=1e-4, rtol=0)
        values, tokens = expected.topk(request.top_logprobs)
        assert [[token for token, _ in row] for row in item.top_logprobs] == tokens.tolist()
        named = torch.tensor([[value for _, value in row] for row in item.top_logprobs])
        torch.testing.assert_close(named, values, atol=1e-4, rtol=0)


def test_sampling_depends_on_the_seed_alone(backend: Backend, prompts: list[tuple[int, ...]]) -> None:
    """Not on slots, on what else is in the batch, or on the order."""
    requests = [
        Request(
            prompt=prompt,
            max_new_tokens=12,
            sampling=Sampling(
                do_sample=True, temperature=2.0, top_k=[0, 50][n % 2], top_p=[1.0, 0.9][n % 3 > 0], seed=n
            ),
        )
        for n, prompt in enumerate(prompts)
    ]
    first = run(Engine(backend, decode, slots=1, length=80), requests)
    again = run(Engine(backend, decode, slots=4, length=80), [*ask(prompts[:3]), *reversed(requests)])[3:]
    assert [item.token_ids for item in first] == [item.token_ids for item in reversed(again)]
    other = [
        Request(
            prompt=request.prompt, max_new_tokens=12, sampling=Sampling(do_sample=True, temperature=2.0, seed=99 + n)
        )
        for n, request in enumerate(requests)
    ]
    assert all(
        a.token_ids != b.token_ids for a, b in zip(first, run(Engine(backend, decode, slots=4), other), strict=True)
    )


def test_a_slot_that_frees_is_filled_at_once(plain: PlainBackend) -> None:
    requests = [
        Request(prompt=(5 + n, *range(20, 40)), max_new_tokens=limit) for n, limit in enumerate([2, 9, 9, 4, 5, 1, 3])
    ]
    run(Engine(plain, decode, slots=3, length=60), requests)
    waiting, running = 7, 0
    left: list[int] = []
    todo = [2, 9, 9, 4, 5, 1, 3]
    for batch in plain.batches:
        if waiting and len(left) < 3:
            new = min(waiting, 3 - len(left))
            assert sorted(batch.widths) == [21] * new, "the waiting ones are computed, and nothing is filled up"
            left += [todo.pop(0) - 1 for _ in range(new)]
            waiting -= new
        else:
            assert list(batch.widths) == [1] * len(left) and list(batch.slots) == list(range(len(left)))
            left = [rest - 1 for rest in left]
        left = [rest for rest in left if rest]
        running = max(running, len(left))
    assert (waiting, left, running) == (0, [], 3)


def test_prompts_of_like_length_are_computed_together(plain: PlainBackend) -> None:
    choose = random.Random(1)
    lengths = (100, 8, 95, 98, 12)
    run(
        Engine(plain, decode, slots=5, length=110),
        ask([tuple(choose.randrange(509) for _ in range(length)) for length in lengths], max_new_tokens=2),
    )
    assert [sorted(batch.widths) for batch in plain.batches[:2]] == [[95, 98, 100], [8, 12]]
    assert [batch.widths for batch in plain.batches[2:]] == [[1] * 5]


def test_what_prompts_have_in_common_is_computed_once(
    plain: PlainBackend, model: PreTrainedModel, prompts: list[tuple[int, ...]]
) -> None:
    """All behind the same examples, as in few-shot prompts; then a conversation that goes on."""
    shots = prompts[4]
    requests = ask([(*shots, 7 + n, *prompts[0]) for n in range(6)], max_new_tokens=3)
    engine = Engine(plain, decode, slots=3, length=100)
    found = run(engine, requests)
    assert [list(item.token_ids) for item in found] == [
        reference(model, request.prompt, max_new_tokens=3) for request in requests
    ]
    assert plain.num_tokens == 60 + 6 * 4 + 6 * 2
    before = plain.num_tokens
    turn = (*requests[5].prompt, *found[5].token_ids, 100, 101)
    (answer,) = run(engine, ask([turn], max_new_tokens=2))
    assert list(answer.token_ids) == reference(model, turn, max_new_tokens=2)
    # The last token of the answer before was never fed to the model.
    assert plain.num_tokens - before == 3 + 1


def test_cancelled_requests_leave_their_slot_to_others(
    backend: Backend, prompts: list[tuple[int, ...]], answers: list[list[int]]
) -> None:
    engine = Engine(backend, decode, slots=2, length=100)
    numbers = [engine.add(request) for request in ask(prompts[:5])]
    seen: dict[int, Completion] = {}
    for _ in range(6):
        seen.update({number: completion for number, completion, _ in engine.step()})
    assert len(seen) == 2
    engine.cancel(numbers[0])
    engine.cancel(numbers[3])
    engine.cancel(numbers[3])
    while engine.busy:
        told = engine.step()
        assert not {number for number, _, _ in told} & {numbers[0], numbers[3]}
        seen.update({number: completion for number, completion, _ in told})
    assert [list(seen[numbers[n]].token_ids) for n in (1, 2, 4)] == [answers[n] for n in (1, 2, 4)]
    assert numbers[3] not in seen
    engine.cancel(numbers[1])
    assert not engine.busy and engine.step() == []


def test_progress_is_told_of_each_token(backend: Backend, prompts: list[tuple[int, ...]]) -> None:
    engine = Engine(backend, decode, slots=2, length=100)
    silent = engine.add(ask(prompts[:1])[0], report=False)
    told = engine.add(ask(prompts[1:2])[0])
    sizes: dict[int, list[int]] = {silent: [], told: []}
    while engine.busy:
        for number, completion, is_finished in engine.step():
            sizes[number].append(len(completion.token_ids))
            assert completion.text == decode(completion.token_ids)
            assert is_finished == (len(completion.token_ids) == NEW)
    assert sizes == {silent: [NEW], told: list(range(1, NEW + 1))}


def test_a_stop_string_ends_one_text_and_not_the_others(
    backend: Backend, prompts: list[tuple[int, ...]], answers: list[list[int]]
) -> None:
    stop = decode(answers[1][7:9])
    assert stop not in decode(answers[2])
    requests = ask(prompts[1:3], stop_strings=(stop, ""))
    one, other = run(Engine(backend, decode, slots=2, length=100), requests)
    begin = decode(answers[1]).index(stop)
    assert (list(one.token_ids), one.text, one.finish_reason) == (
        answers[1][:begin],
        decode(answers[1][:begin]),
        "stop",
    )
    assert (list(other.token_ids), other.finish_reason) == (answers[2], "length")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(prompt=(), max_new_tokens=1), "no tokens"),
        (Request(prompt=(3, 509), max_new_tokens=1), "token ids from 3 to 509"),
        (Request(prompt=(3, -1), max_new_tokens=1), "token ids from -1 to 3"),
        (Request(prompt=(3,), max_new_tokens=0), "max_new_tokens is 0"),
        (Request(prompt=(3,) * 20, max_new_tokens=1), "20 tokens, and there is room for 20"),
        (Request(prompt=(3,), max_new_tokens=1, sampling=Sampling(temperature=-1.0)), "temperature is -1.0"),
    ],
)
def test_requests_that_cannot_be_answered(model: PreTrainedModel, request_: Request, message: str) -> None:
    engine = Engine(PlainBackend(model), decode, slots=1, length=20)
    with pytest.raises(UserError, match=message):
        engine.add(request_)
    assert not engine.busy


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(do_sample=True, top_p=0.5)])
def test_logits_that_are_no_numbers_are_reported(sampling: Sampling, value: float) -> None:
    damaged = build_toy("llama").eval()
    with torch.no_grad():
        damaged.lm_head.weight[7:9] = 0.0
        # One of the two logits is infinity, whatever the sign of what they are made of.
        damaged.lm_head.weight[7:9, 0] = torch.tensor([value, -value])
    engine = Engine(PlainBackend(damaged), decode, slots=1, length=20)
    engine.add(Request(prompt=(3,), max_new_tokens=1, sampling=sampling))
    with pytest.raises(UserError, match="NaN"):
        engine.step()
