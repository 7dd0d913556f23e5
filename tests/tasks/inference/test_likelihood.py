"""Log-likelihoods against a plain transformers computation of each text by itself."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference import likelihood
from mindspeed_llm.tasks.inference.adapters.hf import HFBackend
from mindspeed_llm.tasks.inference.adapters.hf_cache import KeyValueCache
from mindspeed_llm.tasks.inference.likelihood import Likelihood, pair_likelihoods
from mindspeed_llm.tasks.inference.pairs import Pair, encode_pairs
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer
from tests.support import tokenizer_files
from tests.support.toys import build_toy
from tests.tasks.inference.plain_backend import PlainBackend

TOLERANCE = 1e-4

_SHOTS = "".join(
    f"The quick brown fox jumps over {n} lazy dogs, and then {word} isn't there any more.\nAnswer: {letter}\n\n"
    for n, (word, letter) in enumerate(zip(["it", "dog", "fox", "señor"], "ABCA", strict=True))
)
_QUESTIONS = ["How's the fox?", "We've seen it go.", "We've seen naïve dogs jump over it?", "谢谢大家！"]
_CHOICES = [[f" {letter}" for letter in "ABCD"], [" the quick fox", " the quick dog, señor", " it", " the quick"]]
TEXTS: list[tuple[str, str]] = [
    *(
        (f"{shots}{question}\nAnswer:", choice)
        for shots, question, choices in itertools.product((_SHOTS, ""), _QUESTIONS, _CHOICES)
        for choice in choices
    ),
    # A border inside a token, white space at it, no context, the same again, and a text too long for the model.
    ("The qui", "ck brown fox"),
    ("The quick ", "brown"),
    ("", "The quick brown"),
    ("The quick ", "brown"),
    (_SHOTS * 3, "The end, señor"),
]


class Toy(NamedTuple):
    model: torch.nn.Module
    pairs: list[Pair]
    backend: HFBackend
    """Over the same weights."""


@pytest.fixture(scope="module", params=["byte_level", "llama"])
def toy(request) -> Toy:
    if request.param == "llama":
        backend, tokens = tokenizer_files.llama_like(), {"bos_token": "<s>", "eos_token": "</s>"}
    else:
        backend, tokens = tokenizer_files.byte_level_bpe("<|end|>"), {"eos_token": "<|end|>"}
    tokenizer = as_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **tokens))
    pairs = encode_pairs(tokenizer, *zip(*TEXTS, strict=True))
    model = build_toy("llama", vocab_size=len(tokenizer), max_position_embeddings=256)
    return Toy(model, pairs, HFBackend(copy.deepcopy(model), device=torch.device("cpu")))


@torch.no_grad()
def _plain(model: torch.nn.Module, pairs: list[Pair]) -> list[Likelihood]:
    """What transformers says of each text alone; of a long one, of its last positions."""
    found = []
    for pair in pairs:
        tokens = torch.tensor(pair.context + pair.continuation)[-model.config.max_position_embeddings - 1 :]
        logprobs = model(tokens[None, :-1]).logits[0].log_softmax(-1)[-len(pair.continuation) :]
        targets = torch.tensor(pair.continuation)
        found.append(
            Likelihood(
                logprob=logprobs.gather(1, targets[:, None]).double().sum().item(),
                is_greedy=bool((logprobs.argmax(-1) == targets).all()),
                tokens=len(targets),
            )
        )
    return found


def _assert_equal(found: list[Likelihood], expected: list[Likelihood]) -> None:
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert abs(ours.logprob - theirs.logprob) < TOLERANCE, (number, ours, theirs)
        assert (ours.is_greedy, ours.tokens) == (theirs.is_greedy, theirs.tokens), number


def test_the_examples_of_the_tests_have_every_kind(toy) -> None:
    model, pairs, _ = toy
    lengths = [len(pair.context) + len(pair.continuation) for pair in pairs]
    assert sum(length > model.config.max_position_embeddings + 1 for length in lengths) == 1
    assert max(len(pair.continuation) for pair in pairs) > 3
    assert any(len(pair.continuation) == 1 for pair in pairs)


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_equal_to_transformers(toy, batch_size: int | None) -> None:
    model, pairs, backend = toy
    expected = _plain(model, pairs)
    done: dict[int, Likelihood] = {}
    found = pair_likelihoods(backend, pairs, batch_size=batch_size, on_done=done.__setitem__)
    _assert_equal(found, expected)
    assert [done[number] for number in range(len(pairs))] == found
    # Reading off logits, of which a random model has no greedy continuation, has to be tried as well.
    greedy = [_greedy(model, pair) for pair in pairs[:6]]
    assert all(result.is_greedy for result in pair_likelihoods(backend, greedy))


@torch.no_grad()
def _greedy(model: torch.nn.Module, pair: Pair) -> Pair:
    tokens = list(pair.context)
    for _ in range(3):
        tokens.append(int(model(torch.tensor(tokens)[None]).logits[0, -1].argmax()))
    return replace(pair, continuation=tuple(tokens[-3:]))


def test_pieces_and_few_slots_change_nothing(toy, monkeypatch) -> None:
    model, pairs, _ = toy
    monkeypatch.setattr(likelihood, "_MAX_TOKENS", 23)
    monkeypatch.setattr(likelihood, "_MAX_LOGITS", 5 * model.config.vocab_size)
    monkeypatch.setattr(likelihood, "_MAX_POSITIONS", 1000)
    plain = PlainBackend(model)
    _assert_equal(pair_likelihoods(plain, pairs), _plain(model, pairs))
    assert all(batch.tokens.numel() <= 23 or batch.tokens.shape[1] == 1 for batch in plain.batches)
    assert all(len(batch.wanted) <= max(5, len(batch.slots)) for batch in plain.batches)
    (cache,) = plain.caches
    assert cache.slots * cache.length <= 1000


def test_what_is_shared_is_computed_once(toy) -> None:
    model, pairs, _ = toy
    plain = PlainBackend(model)
    asked = [pair for pair, (context, _) in zip(pairs, TEXTS, strict=True) if context.startswith(_SHOTS)][:-1]
    pair_likelihoods(plain, asked)
    assert [start for batch in plain.batches for start in batch.starts].count(0) == 1
    assert plain.num_tokens < 0.3 * sum(len(pair.context) for pair in asked)
    # Continuations that differ in their last token alone are read off one row of logits.
    assert len({pair.context + pair.continuation[:-1] for pair in pairs[:4]}) == 1
    plain.batches.clear()
    pair_likelihoods(plain, pairs[:4])
    assert plain.num_tokens == len(pairs[0].context) + len(pairs[0].continuation) - 1


def test_numbers_do_not_depend_on_what_else_is_asked(toy) -> None:
    _, pairs, backend = toy
    together = pair_likelihoods(backend, pairs)
    _assert_equal([pair_likelihoods(backend, [pair])[0] for pair in pairs], together)
    _assert_equal(pair_likelihoods(backend, pairs[::-1])[::-1], together)
    # The same call gives the same bits, and so do equal pairs of one call.
    assert pair_likelihoods(backend, pairs) == together
    assert TEXTS[-2] == TEXTS[-4] and together[-2] == together[-4]


def test_ties_stay_ties(toy) -> None:
    """A model that finds all tokens equally likely finds all continuations of a length equally likely, to the bit."""
    model, pairs, _ = toy
    flat = build_toy("llama", vocab_size=model.config.vocab_size)
    torch.nn.init.zeros_(flat.get_output_embeddings().weight)
    found = pair_likelihoods(HFBackend(flat, device=torch.device("cpu")), pairs)
    assert len({result.logprob for result in found if result.tokens == 1}) == 1
    each = -math.log(model.config.vocab_size)
    assert all(result.logprob == pytest.approx(result.tokens * each, rel=1e-6) for result in found)


def test_a_text_that_lost_its_beginning_is_spoken_of(toy, caplog) -> None:
    _, pairs, backend = toy
    pair_likelihoods(backend, pairs)
    assert [record.message for record in caplog.records if "left out" in record.message] == [
        f"1 of {len(pairs)} texts are longer than the 256 positions of the model: the beginnings of their contexts are "
        "left out. Fewer examples in a prompt make it shorter."
    ]
    with pytest.raises(UserError, match="A continuation has 300 tokens, the model has 256 positions"):
        pair_likelihoods(backend, [Pair(context=(1,), continuation=(1,) * 300)])
    assert pair_likelihoods(backend, []) == []


def _one_position_back(monkeypatch) -> None:
    batch = likelihood.Batch
    monkeypatch.setattr(
        likelihood,
        "Batch",
        lambda **fields: batch(**{**fields, "starts": [max(start - 1, 0) for start in fields["starts"]]}),
    )


def _without_the_border_token(monkeypatch) -> None:
    row = likelihood.to_row

    def shortened(pair: Pair, max_length: int):
        found = row(pair, max_length)
        return replace(found, targets=found.targets[1:]) if len(found.targets) > 1 else found

    monkeypatch.setattr(likelihood, "to_row", shortened)


def _without_copies(monkeypatch) -> None:
    monkeypatch.setattr(KeyValueCache, "copy", lambda *_: None)


def _target_of_the_next_token(monkeypatch) -> None:
    wanted = likelihood._wanted

    def shifted(*arguments):
        return {
            node: {position - 1 if position - 1 in places else position: users for position, users in places.items()}
            for node, places in wanted(*arguments).items()
        }

    monkeypatch.setattr(likelihood, "_wanted", shifted)


@pytest.mark.parametrize(
    "mutant", [_one_position_back, _without_the_border_token, _without_copies, _target_of_the_next_token]
)
def test_a_mutant_is_caught(toy, monkeypatch, mutant: Callable) -> None:
    model, pairs, backend = toy
    expected = _plain(model, pairs)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        _assert_equal(pair_likelihoods(backend, pairs), expected)
