"""Choosing tokens: transformers' logits processors are the authority for scores, exact probabilities for draws."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.bounds import REPETITION_PENALTY, TEMPERATURE
from mindspeed_llm.tasks.inference.generation import Sampling
from mindspeed_llm.tasks.inference.sampling import Sampler, check, choices, choose

PROCESSORS = {
    "repetition_penalty": (RepetitionPenaltyLogitsProcessor, 1.0),
    "temperature": (TemperatureLogitsWarper, 1.0),
    "top_k": (TopKLogitsWarper, 0),
    "top_p": (TopPLogitsWarper, 1.0),
}


def reference(logits: Tensor, texts: Tensor, values: dict[str, float]) -> Tensor:
    """The scores of transformers, whose order of processors this is."""
    wanted = [kind(values[name]) for name, (kind, off) in PROCESSORS.items() if values.get(name, off) != off]
    return LogitsProcessorList(wanted)(texts, logits.clone())


def scores_of(logits: Tensor, texts: Tensor, sampling: Sampling) -> Tensor:
    """Ours, with minus infinity for what is not among the choices."""
    found = choices(logits, sampling, [torch.tensor(sorted(set(text))) for text in texts.tolist()])
    if found.tokens is None:
        return found.scores
    assert (found.tokens.diff(dim=-1) > 0).all()
    return torch.full_like(logits, float("-inf")).scatter(-1, found.tokens, found.scores)


def same(ours: Tensor, expected: Tensor, *, has_ties: bool) -> bool:
    """Which of equal tokens top-p keeps is arbitrary in transformers, as its sort is: then what is kept must be as many
    of each score, and unchanged.
    """
    if not has_ties:
        return torch.equal(ours, expected)
    return torch.equal(ours.sort(dim=-1)[0], expected.sort(dim=-1)[0])


def logits_of(kind: str, size: int) -> Tensor:
    """[3, size]; `ties` are in steps of a half, `peaked` are like a language model's."""
    drawn = torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    return {"flat": drawn * 0.2, "peaked": drawn * 4, "ties": (drawn * 4).round() / 2, "equal": torch.zeros(3, size)}[
        kind
    ]


@pytest.mark.parametrize("size", [3, 97, 5000])
@pytest.mark.parametrize("kind", ["flat", "peaked", "ties", "equal"])
def test_scores_are_those_of_transformers(kind: str, size: int) -> None:
    logits = logits_of(kind, size)
    kept = logits.clone()
    texts = torch.randint(0, size, (3, 20), generator=torch.Generator().manual_seed(1))
    compared = 0
    for penalty, temperature, top_k, top_p in product(
        [1.0, 1.3, 0.7], [1.0, 0.6, 2.5], [0, 1, 2, 40, 10**6], [1.0, 0.999999, 0.9, 0.5, 0.1, 1e-6]
    ):
        values = {"repetition_penalty": penalty, "temperature": temperature, "top_k": top_k, "top_p": top_p}
        ours = scores_of(logits, texts, Sampling(do_sample=True, **{**values, "top_k": top_k}))
        expected = reference(logits, texts, values)
        assert same(ours, expected, has_ties=kind in ("ties", "equal")), values
        compared += int(expected.isinf().any())
    assert compared > 100
    assert torch.equal(logits, kept)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 2), (0.500001, 3), (0.25, 1), (0.75, 3), (0.0, 4), (1.0, 4)])
def test_border_of_top_p_on_exact_probabilities(top_p: float, kept: int) -> None:
    """Four tokens of probability 1/4; 0 stands for off here, as on the command line."""
    logits = torch.zeros(1, 4)
    ours = scores_of(logits, torch.zeros(1, 0, dtype=torch.int64), Sampling(do_sample=True, top_p=top_p))
    assert int((~ours.isinf()).sum()) == kept
    if top_p:
        assert same(ours, reference(logits, torch.zeros(1, 1, dtype=torch.int64), {"top_p": top_p}), has_ties=True)


def test_few_candidates_give_way_to_all_where_the_nucleus_is_larger() -> None:
    logits = torch.zeros(2, 3000)
    logits[0, 17] = 20.0
    texts = torch.zeros(2, 1, dtype=torch.int64)
    ours = scores_of(logits, texts, Sampling(do_sample=True, top_p=0.9))
    assert same(ours, reference(logits, texts, {"top_p": 0.9}), has_ties=True)
    assert (~ours.isinf()).sum(dim=-1).tolist()[0] == 1


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Of Pearson's chi-square test; tokens expected fewer than 5 times are taken together."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    groups = [(counts[~rare], expected[~rare])]
    if expected[rare].sum() > 0:
        groups.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    observed, expected = (torch.cat(column).double() for column in zip(*groups, strict=True))
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(expected) - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


VALUES = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 20},
    {"top_p": 0.8},
    {"repetition_penalty": 1.4, "temperature": 0.9, "top_k": 30, "top_p": 0.9},
]


@pytest.mark.parametrize("values", VALUES, ids=str)
def test_draws_have_the_exact_distribution(values: dict[str, float]) -> None:
    """One sampler draws in rows beside others; so does the first draw of each of many seeds."""
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(5)) * 1.5
    text = [3, 3, 9, 41]
    exact = reference(logits, torch.tensor([text]), values).double().softmax(dim=-1)[0]
    sampler = Sampler(Sampling(do_sample=True, seed=11, **values), text)
    other = Sampler(Sampling(do_sample=True, seed=12), [])
    one = [choose(logits.expand(2, -1), [other, sampler])[1].item() for _ in range(4000)]
    seeds = [Sampler(Sampling(do_sample=True, seed=seed, **values), text) for seed in range(4000)]
    many = choose(logits.expand(len(seeds), -1), seeds).tolist()
    for drawn in (one, many):
        counts = torch.bincount(torch.tensor(drawn), minlength=60)
        assert not counts[exact == 0].any()
        assert p_value(counts, exact) > 1e-3
        # The test sees a distribution that is a little off.
        assert p_value(counts, (exact.sqrt() / exact.sqrt().sum())) < 1e-3


def test_rows_are_chosen_each_by_its_own_parameters() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(2)) * 2
    samplings = [
        Sampling(),
        Sampling(do_sample=True, seed=3),
        Sampling(repetition_penalty=2.0),
        Sampling(do_sample=True, top_k=5, seed=4),
        Sampling(do_sample=True, top_p=0.7, seed=3),
        Sampling(do_sample=True, top_k=5, seed=5),
    ]
    text = logits[2].topk(3)[1].tolist()
    together = choose(logits, [Sampler(sampling, text) for sampling in samplings])
    alone = [choose(logits[row : row + 1], [Sampler(sampling, text)]).item() for row, sampling in enumerate(samplings)]
    assert together.tolist() == alone
    assert together[0] == logits[0].argmax()
    assert together[2] == reference(logits[2:3], torch.tensor([text]), {"repetition_penalty": 2.0}).argmax()
    assert together[2] != logits[2].argmax()


def test_the_penalty_sees_tokens_that_are_added() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.9]])
    sampler = Sampler(Sampling(repetition_penalty=1.2), [0])
    assert choose(logits, [sampler]).item() == 1
    sampler.add(1)
    assert choose(logits, [sampler]).item() == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1e-38}, "temperature is 1e-38; expected a number from 1e-05 to 100000"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"repetition_penalty": 0.0}, "repetition penalty is 0.0"),
        ({"repetition_penalty": 1e-39}, "repetition penalty is 1e-39; expected a number from 0.001 to 1000"),
        ({"top_k": -1}, "top-k is -1"),
        ({"top_p": 1.1}, "top-p is 1.1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(Sampling(do_sample=True, **values))
    check(Sampling(do_sample=True, temperature=0.01, top_k=0, top_p=0.0, seed=2**64 - 1))


def test_at_the_bounds_there_are_tokens_to_draw() -> None:
    """The lowest values draw the most probable token also where logits are large, whatever the number is."""
    logits = torch.tensor([[-9e5, 8e5, 9e5, -1e5, 0.0]])
    for penalty in (REPETITION_PENALTY.low, REPETITION_PENALTY.high):
        sampling = Sampling(do_sample=True, temperature=TEMPERATURE.low, repetition_penalty=penalty)
        found = choices(logits.expand(2, -1), sampling, [torch.tensor([0, 2])] * 2)
        assert found.scores.isfinite().all()
        tokens = found.drawn(torch.tensor([0.0, 0.999], dtype=torch.float64))
        assert tokens.tolist() == ([2, 2] if penalty < 1 else [1, 1])
