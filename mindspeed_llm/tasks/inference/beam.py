"""Beam search, greedy or drawn, with the rules of transformers' generate(num_beams=..., early_stopping=False).

At each step every beam's next tokens compete with those of all others; the best `beams` that go on stay, and those that
end among the best are kept aside, ranked by their sums over length to a power. The search ends when no beam can do
better than the worst of as many answers that are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.backend import Batch, Cache
from mindspeed_llm.tasks.inference.bounds import LENGTH_PENALTY, check_beams
from mindspeed_llm.tasks.inference.damage import refuse_damaged
from mindspeed_llm.tasks.inference.generation import Completion, Request
from mindspeed_llm.tasks.inference.sampling import choices, penalised
from mindspeed_llm.tasks.inference.stop_strings import first_stop
from mindspeed_llm.tasks.inference.text_in_work import TextInWork

if TYPE_CHECKING:
    from mindspeed_llm.tasks.inference.causal_lm import CausalLM

_NEVER = float("-inf")
"""The score of what must not be chosen. A finite one, as transformers has it, would be above that of answers where a
low temperature, or an exponent of their lengths, makes large numbers.
"""


@dataclass(frozen=True, kw_only=True)
class _Beam:
    """An answer, or what there is of it, with what the model says of its tokens."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass
class _Kept:
    """The best answers that have ended, best first; places that nothing has taken yet have no answer of worth."""

    beams: list[_Beam]
    ranks: Tensor
    """[beams], fp64, of `_rank`."""

    def add(self, candidates: list[_Beam], ranks: Tensor) -> None:
        """Let candidates take the places of worse ones."""
        merged = torch.cat([self.ranks, ranks])
        best = merged.topk(len(self.beams))[1]
        beams = [*self.beams, *candidates]
        self.beams, self.ranks = [beams[place] for place in best.tolist()], merged[best]


def _rank(sums: Tensor, length: int, length_penalty: float) -> Tensor:
    """Numbers that put sums of log-probabilities over their length to a power into order, the best first, also those of
    different lengths: minus the logarithms of the quotients, which are numbers whatever the power is.
    """
    return length_penalty * math.log(length) - (-sums).clamp(min=0.0).log()


def beam_search(
    lm: CausalLM, request: Request, beams: int, *, length_penalty: float = 1.0, sample: bool = False
) -> Completion:
    """The best answer that a search finds (a collective of the ranks that share a copy of the model).

    Args:
        request: its seed decides what is drawn, and its temperature, top-k and top-p count, with `sample` alone.
        beams: answers that are followed at once. One is a greedy (or drawn) answer.
        length_penalty: answers are compared by the sum of their log-probabilities over their length to this power:
            above 0 long ones gain, below 0 short ones.
        sample: draw the tokens that compete, twice as many as there are beams or more, without putting back; of these
            the best are taken.

    Raises:
        UserError: there is no beam, or there are more than the model has tokens, or than can be drawn from; the penalty
            is out of range; the model's logits are not numbers.
    """
    if beams < 1:
        raise UserError(f"--num-beams is {beams}; expected at least 1")
    if not LENGTH_PENALTY.has(length_penalty):
        raise UserError(f"--length-penalty is {length_penalty!r}; expected {LENGTH_PENALTY}")
    request = replace(request, sampling=replace(request.sampling, do_sample=sample))
    if beams == 1:
        return lm.generate([request])[0]
    return _Search(lm, request, beams, length_penalty).run()


class _Search:
    def __init__(self, lm: CausalLM, request: Request, beams: int, length_penalty: float) -> None:
        self._lm, self._request, self._length_penalty, self._num_beams = lm, request, length_penalty, beams
        # As many as are sure to leave enough that go on, if each beam's best tokens are those that end it.
        self._tokens_kept = max(2, 1 + len(request.stop_ids))
        self._num_candidates = self._tokens_kept * beams
        check_beams(beams, lm.backend.vocab_size, sample=request.sampling.do_sample, tokens_kept=self._tokens_kept)
        self._most_tokens = min(request.max_new_tokens, lm.max_length - len(request.prompt))
        self._generator = torch.Generator().manual_seed(request.sampling.seed)
        self._stop_strings = tuple(filter(None, request.stop_strings))

    def run(self) -> Completion:
        device, num = self._lm.backend.device, self._num_beams
        beams = [_Beam()] * num
        scores = torch.full((num,), _NEVER, device=device)
        scores[0] = 0.0  # all begin alike: without this each candidate would be there several times
        kept = _Kept([_Beam()] * num, torch.full((num,), _NEVER, dtype=torch.float64))
        cache = self._lm.backend.new_cache(num, len(self._request.prompt) + self._most_tokens - 1)
        logits = self._prefill(cache)
        for length in range(1, self._most_tokens + 1):
            candidates, sums, parents = self._candidates(beams, scores, logits)
            ends = torch.tensor([length == self._most_tokens or self._has_ended(beam) for beam in candidates])
            scores, going = sums.masked_fill(ends.to(device), _NEVER).topk(num)
            ranks = _rank(sums.cpu().double(), length, self._length_penalty)
            # What ends further down was there only to leave enough that go on.
            kept.add(candidates[:num], ranks[:num].masked_fill(~ends[:num], _NEVER))
            best_going = ranks.masked_fill(ends, _NEVER).max()
            if bool(ends.all()) or bool(best_going <= kept.ranks.min()):
                break
            chosen = going.tolist()
            beams = [candidates[place] for place in chosen]
            logits = self._extend(cache, beams, [parents[place] for place in chosen])
        return self._completion(kept.beams[0])

    def _prefill(self, cache: Cache) -> Tensor:
        """Put the prompt into all slots; the logits behind it, [beams, V]."""
        prompt, num = self._request.prompt, self._num_beams
        batch = Batch(
            tokens=torch.tensor([prompt]), widths=[len(prompt)], slots=[0], starts=[0], wanted=[(0, len(prompt) - 1)]
        )
        logits = self._lm.backend.forward(batch, cache)
        cache.copy([0] * (num - 1), list(range(1, num)), len(prompt))
        return logits.expand(num, -1)

    def _extend(self, cache: Cache, beams: list[_Beam], parents: list[int]) -> Tensor:
        """Move the beams' keys and values to their places and compute their last tokens; the logits, [beams, V]."""
        num, filled = self._num_beams, len(self._request.prompt) + len(beams[0].ids) - 1
        moves = [(parent, place) for place, parent in enumerate(parents) if parent != place]
        if moves:
            cache.copy([parent for parent, _ in moves], [place for _, place in moves], filled)
        batch = Batch(
            tokens=torch.tensor([[beam.ids[-1]] for beam in beams]),
            widths=[1] * num,
            slots=list(range(num)),
            starts=[filled] * num,
            wanted=[(place, 0) for place in range(num)],
        )
        return self._lm.backend.forward(batch, cache)

    def _candidates(self, beams: list[_Beam], scores: Tensor, logits: Tensor) -> tuple[list[_Beam], Tensor, list[int]]:
        """(longer beams, their sums [candidates], the place of each one's parent), best first."""
        sampling = self._request.sampling
        logprobs = logits.float().log_softmax(-1)
        refuse_damaged(logprobs.amax(-1))
        sums = (self._scores(logprobs, beams) + scores[:, None]).flatten()
        if sampling.do_sample:
            # On the CPU, so that the same are drawn wherever the model is.
            drawn = torch.multinomial(
                sums.softmax(-1).cpu(), num_samples=self._num_candidates, generator=self._generator
            ).to(sums.device)
            best, order = sums[drawn].sort(descending=True)
            places = drawn[order]
        else:
            best, places = sums.topk(self._num_candidates)
        vocab_size = logits.shape[-1]
        parents, tokens = (places // vocab_size).tolist(), (places % vocab_size).tolist()
        values = logprobs.flatten()[places].tolist()
        top = self._top(logprobs)
        candidates = [
            _Beam(
                ids=(*beams[parent].ids, token),
                logprobs=(*beams[parent].logprobs, value),
                top=(*beams[parent].top, top[parent]) if top else (),
            )
            for parent, token, value in zip(parents, tokens, values, strict=True)
        ]
        return candidates, best, parents

    def _scores(self, logprobs: Tensor, beams: list[_Beam]) -> Tensor:
        """What the next tokens add to their beams' sums: as transformers does it, penalty and filters are applied to
        log-probabilities instead of logits, and what is left is not brought back to a sum of 1.
        """
        sampling = self._request.sampling
        seen = [torch.tensor(sorted({*self._request.prompt, *beam.ids}), device=logprobs.device) for beam in beams]
        if not sampling.do_sample:
            return penalised(logprobs, sampling.repetition_penalty, seen)
        found = choices(logprobs, sampling, seen, keep=self._tokens_kept)
        if found.tokens is None:
            return found.scores
        return torch.full_like(logprobs, float("-inf")).scatter(-1, found.tokens, found.scores)

    def _top(self, logprobs: Tensor) -> list[tuple[tuple[int, float], ...]]:
        """The alternatives at this token that the request asks for, by beam; empty where it asks for none."""
        if not self._request.top_logprobs:
            return []
        values, tokens = logprobs.topk(self._request.top_logprobs)
        return [tuple(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]

    def _has_ended(self, beam: _Beam) -> bool:
        if beam.ids[-1] in self._request.stop_ids:
            return True
        return bool(self._stop_strings) and first_stop(self._lm.decode(beam.ids), self._stop_strings) is not None

    def _completion(self, beam: _Beam) -> Completion:
        """The answer as any other is told: without what ended it."""
        text = TextInWork(0, self._request, length=self._lm.max_length, decode=self._lm.decode, report=False)
        for place, (token, logprob) in enumerate(zip(beam.ids, beam.logprobs, strict=True)):
            text.add(token, logprob, beam.top[place] if beam.top else ())
        return text.completion()
