"""Beam search against transformers.generate, token for token."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference import beam
from mindspeed_llm.tasks.inference.adapters.hf import HFBackend
from mindspeed_llm.tasks.inference.adapters.hf_cache import KeyValueCache
from mindspeed_llm.tasks.inference.beam import beam_search
from mindspeed_llm.tasks.inference.bounds import REPETITION_PENALTY, TEMPERATURE
from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.generation import Request, Sampling
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from tests.support.tokenizers import byte_tokenizer
from tests.support.toys import build_toy
from tests.tasks.inference.plain_backend import PlainBackend

NEW_TOKENS = 12
_RANDOM = torch.Generator().manual_seed(1)
PROMPTS = [torch.randint(3, 258, (length,), generator=_RANDOM).tolist() for length in (1, 9, 30)]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """Its vocabulary is small and its distributions are flat, so that beams change places and end early."""
    model = build_toy("llama", vocab_size=258, max_position_embeddings=64)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.3)
    model.config.use_cache = True
    # Tests name the ends; with none named, transformers would take these.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def lm(model) -> CausalLM:
    backend = HFBackend(copy.deepcopy(model), device=torch.device("cpu"))
    return CausalLM(backend, as_tokenizer(byte_tokenizer()), stop_ids=frozenset())


@pytest.fixture(scope="module")
def ends(model) -> dict[tuple[int, ...], list[int]]:
    """Prompt -> tokens that are met early in good answers to it."""
    found = {}
    for prompt in PROMPTS:
        answers = _theirs(model, prompt, 4, ends=[], count=4)
        tokens = [row[place] for row, place in zip(answers, (1, 3, 2, 1), strict=True)]
        found[tuple(prompt)] = list(dict.fromkeys(tokens))
    return found


def _theirs(
    model: torch.nn.Module, prompt: list[int], beams: int, *, ends: list[int], count: int = 1, seed: int = 0, **options
) -> list[list[int]]:
    torch.manual_seed(seed)
    config = GenerationConfig(
        num_beams=beams,
        max_new_tokens=NEW_TOKENS,
        do_sample=options.pop("do_sample", False),
        early_stopping=False,
        eos_token_id=ends or None,
        pad_token_id=0,
        num_return_sequences=count,
        **options,
    )
    found = model.generate(torch.tensor([prompt]), generation_config=config)[:, len(prompt) :].tolist()
    # Behind its end an answer is filled up.
    return [list(itertools.takewhile(lambda token: token not in ends, row)) for row in found]


def _ours(lm: CausalLM, prompt: list[int], beams: int, ends: list[int], *, sample: bool = False, **options):
    length_penalty = options.pop("length_penalty", 1.0)
    request = Request(
        prompt=tuple(prompt), max_new_tokens=NEW_TOKENS, stop_ids=frozenset(ends), sampling=Sampling(**options)
    )
    return beam_search(lm, request, beams, length_penalty=length_penalty, sample=sample)


def _difference(lm: CausalLM, model: torch.nn.Module, all_ends: dict, **options) -> str | None:
    """The first answer of ours that is other than transformers', over prompts, beams and sets of ends."""
    for prompt, beams, num_ends in itertools.product(PROMPTS, (2, 4), (0, 1, 3)):
        ends = all_ends[tuple(prompt)][:num_ends]
        (theirs,) = _theirs(model, prompt, beams, ends=ends, **options)
        ours = _ours(lm, prompt, beams, ends, **options)
        if list(ours.token_ids) != theirs:
            return f"{len(prompt)} tokens, {beams} beams, ends {ends}: {ours.token_ids} instead of {theirs}"
    return None


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -0.5])
def test_equal_to_transformers(lm, model, ends, length_penalty: float) -> None:
    assert _difference(lm, model, ends, length_penalty=length_penalty) is None


def test_repetition_penalty_is_transformers(lm, model, ends) -> None:
    assert _difference(lm, model, ends, repetition_penalty=1.3) is None


def test_the_prompts_are_worth_asking(model, ends) -> None:
    """Answers end early, late and not at all, and are other than the greedy ones."""
    lengths, other = set(), 0
    for prompt in PROMPTS:
        (beam,) = _theirs(model, prompt, 4, ends=ends[tuple(prompt)][:1])
        (greedy,) = _theirs(model, prompt, 1, ends=ends[tuple(prompt)][:1])
        lengths.add(len(beam))
        other += beam != greedy
    assert NEW_TOKENS in lengths or len(lengths) > 1
    assert other >= 2


SAMPLINGS = [{}, {"temperature": 0.7, "top_k": 5}, {"top_k": 1, "top_p": 0.01}, {"temperature": 1.5, "top_p": 0.8}]


@pytest.mark.parametrize("options", SAMPLINGS)
def test_drawn_beams_are_those_of_transformers_with_the_seed(lm, model, ends, options: dict) -> None:
    theirs = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, **options}
    for prompt, beams, seed in itertools.product(PROMPTS[1:], (2, 4), (0, 7)):
        first = ends[tuple(prompt)][:1]
        (expected,) = _theirs(model, prompt, beams, ends=first, seed=seed, do_sample=True, **theirs)
        found = _ours(lm, prompt, beams, first, sample=True, seed=seed, **options)
        assert list(found.token_ids) == expected
        assert _ours(lm, prompt, beams, first, sample=True, seed=seed, **options) == found


def test_seeds_draw_different_answers(lm) -> None:
    answers = {_ours(lm, PROMPTS[1], 2, [], sample=True, seed=seed).token_ids for seed in range(5)}
    assert len(answers) > 1


@torch.no_grad()
def test_what_is_said_of_tokens_is_the_models_own(lm, model) -> None:
    request = Request(prompt=tuple(PROMPTS[2]), max_new_tokens=NEW_TOKENS, top_logprobs=3)
    answer = beam_search(lm, request, 4)
    text = torch.tensor(PROMPTS[2] + list(answer.token_ids))
    logprobs = model(text[None, :-1]).logits[0, len(PROMPTS[2]) - 1 :].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)
    values, tokens = logprobs.topk(3)
    assert [[token for token, _ in row] for row in answer.top_logprobs] == tokens.tolist()
    torch.testing.assert_close(
        torch.tensor([[value for _, value in row] for row in answer.top_logprobs]), values, atol=1e-5, rtol=0
    )
    assert answer.finish_reason == "length"
    assert answer.text == lm.decode(answer.token_ids)


def test_stop_strings_end_beams(lm) -> None:
    """An answer is cut where the string begins; the search does not follow it any further."""
    free = _ours(lm, PROMPTS[1], 4, [])
    text = lm.decode(free.token_ids)
    place = next(place for place in range(2, len(text) - 1) if text[place : place + 2].isascii())
    request = Request(prompt=tuple(PROMPTS[1]), max_new_tokens=NEW_TOKENS, stop_strings=(text[place : place + 2],))
    # With a penalty on long answers that end is the best one wherever it is met first.
    answer = beam_search(lm, request, 4, length_penalty=0.0)
    assert text[place : place + 2] not in answer.text
    assert answer.text == lm.decode(answer.token_ids) or answer.text.startswith(lm.decode(answer.token_ids))


def test_one_beam_is_greedy_and_none_is_refused(lm, model) -> None:
    (greedy,) = _theirs(model, PROMPTS[1], 1, ends=[])
    assert list(_ours(lm, PROMPTS[1], 1, []).token_ids) == greedy
    with pytest.raises(UserError, match="--num-beams is 0; expected at least 1"):
        _ours(lm, PROMPTS[1], 0, [])
    with pytest.raises(UserError, match="a search looks at 400 next tokens, the model has 258"):
        _ours(lm, PROMPTS[1], 200, [])
    wide = SimpleNamespace(max_length=64, backend=SimpleNamespace(vocab_size=2**22))
    request = Request(prompt=(5,), max_new_tokens=2)
    with pytest.raises(UserError, match=r"--num-beams is 5: .* 5 x 4194304 of this model, .* Take 4 beams or fewer"):
        beam_search(wide, request, 5, sample=True)


@pytest.mark.parametrize(("length_penalty", "of_theirs"), [(1e6, 6.0), (-1e3, -3.0)])
def test_lengths_to_any_power(lm, model, ends, length_penalty: float, of_theirs: float) -> None:
    """Where the length decides alone, and then the sum. transformers has numbers for smaller powers only."""
    first = ends[tuple(PROMPTS[2])][:1]
    (theirs,) = _theirs(model, PROMPTS[2], 4, ends=first, length_penalty=of_theirs)
    assert (len(theirs) == NEW_TOKENS) == (length_penalty > 0)
    assert list(_ours(lm, PROMPTS[2], 4, first, length_penalty=length_penalty).token_ids) == theirs


def test_drawn_beams_have_an_answer_whatever_is_asked(lm) -> None:
    """Sums are far below what stands for an answer that there is not in transformers."""
    for options in ({"temperature": TEMPERATURE.low}, {"repetition_penalty": REPETITION_PENALTY.high}):
        options = {"repetition_penalty": REPETITION_PENALTY.high, "temperature": TEMPERATURE.low} | options
        answers = {_ours(lm, PROMPTS[2], 2, [], sample=True, seed=seed, **options).token_ids for seed in (0, 1)}
        assert [len(answer) for answer in answers] == [NEW_TOKENS], "what is most probable is drawn"
    with pytest.raises(UserError, match=r"--length-penalty is 10000000.0; expected a number from -1000000 to 1000000"):
        _ours(lm, PROMPTS[1], 2, [], length_penalty=1e7)


@pytest.mark.parametrize("sample", [False, True])
def test_logits_that_are_no_numbers_are_reported(lm, model, sample: bool) -> None:
    damaged = copy.deepcopy(model)
    with torch.no_grad():
        damaged.get_output_embeddings().weight[7] = float("nan")
    found = CausalLM(PlainBackend(damaged), lm.tokenizer, stop_ids=frozenset())
    with pytest.raises(UserError, match=r"logits are not numbers \(NaN\)"):
        _ours(found, PROMPTS[1], 2, [], sample=sample)


def test_answers_end_where_the_model_has_no_more_positions(lm) -> None:
    request = Request(prompt=(5,) * 60, max_new_tokens=NEW_TOKENS)
    assert len(beam_search(lm, request, 2).token_ids) == 4


def test_beams_without_keys_and_values_are_the_same(lm, model) -> None:
    plain = CausalLM(PlainBackend(model), lm.tokenizer, stop_ids=frozenset())
    assert _ours(plain, PROMPTS[2], 4, []).token_ids == _ours(lm, PROMPTS[2], 4, []).token_ids


def _others_keys(monkeypatch) -> None:
    """Beams keep the keys and values of others; the prompt is put into their slots all the same."""
    moved = KeyValueCache.copy

    def copied(cache: KeyValueCache, sources: list[int], targets: list[int], length: int) -> None:
        if set(sources) == {0}:
            moved(cache, sources, targets, length)

    monkeypatch.setattr(KeyValueCache, "copy", copied)


def _other_length(monkeypatch) -> None:
    search = beam._Search
    monkeypatch.setattr(beam, "_Search", lambda lm, request, beams, penalty: search(lm, request, beams, penalty + 1))


def _no_ends(monkeypatch) -> None:
    monkeypatch.setattr(beam._Search, "_has_ended", lambda *_: False)


@pytest.mark.parametrize("mutant", [_others_keys, _other_length, _no_ends])
def test_a_mutant_is_caught(lm, model, ends, monkeypatch, mutant) -> None:
    mutant(monkeypatch)
    assert _difference(lm, model, ends, length_penalty=0.0) is not None
