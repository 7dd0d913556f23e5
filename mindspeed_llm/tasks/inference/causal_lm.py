"""A causal language model as all commands see it: text in, text or log-probabilities out, whatever backend is below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.backend import Backend
from mindspeed_llm.tasks.inference.engine import Engine
from mindspeed_llm.tasks.inference.generation import Completion, Request, Sampling
from mindspeed_llm.tasks.inference.sampling import check
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer

if TYPE_CHECKING:
    from mindspeed_llm.tasks.inference.likelihood import Likelihood

_GREEDY = Sampling()
_ROOM = 2048
"""Positions of the cache for single texts, at least: a conversation grows."""


class CausalLM:
    """A model and its tokenizer. The model must not change: what was computed for one text serves the next that begins
    alike.

    Ranks that share one copy of the model make the same calls with the same arguments, and get the same answers.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        *,
        stop_ids: frozenset[int],
        batch_size: int = 1,
        description: str = "",
        fingerprint: str | None = None,
    ) -> None:
        """
        Args:
            stop_ids: tokens that end every answer.
            batch_size: texts that are worked on together, where a call does not say.
            description: what was loaded, for people.
            fingerprint: a hash that tells checkpoints apart; None where there is none.
        """
        self.backend = backend
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.batch_size = batch_size
        self.description = description
        self.fingerprint = fingerprint
        self._vocabulary: dict[str, int] | None = None
        self._single: Engine | None = None

    @property
    def max_length(self) -> int:
        """Tokens that a text can have, new ones included."""
        return self.backend.max_length

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts around texts."""
        return self.tokenizer.encode(text, add_special_tokens=True)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special tokens are left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def request(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int,
        stop: Sequence[str] = (),
        sampling: Sampling = _GREEDY,
        top_logprobs: int = 0,
    ) -> Request:
        """What the engine is asked for.

        Args:
            prompt: a text, or token ids that are taken as they are.
            stop: strings that end the answer; a special token's name stands for the token.

        Raises:
            UserError: the prompt is empty or leaves no room for an answer, or another argument is out of range.
        """
        ids = tuple(self.encode(prompt) if isinstance(prompt, str) else prompt)
        if not ids:
            if self.tokenizer.bos_token_id is None:
                raise UserError("the prompt is empty, and the tokenizer has no token that begins texts; write a prompt")
            ids = (self.tokenizer.bos_token_id,)
        check_room(len(ids), self.max_length)
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
        check(sampling)
        return Request(
            prompt=ids,
            max_new_tokens=max_new_tokens,
            stop_ids=self.stop_ids.union(filter(None, map(self._special_token, stop))),
            stop_strings=tuple(dict.fromkeys(filter(None, stop))),
            sampling=sampling,
            top_logprobs=top_logprobs,
        )

    def generate(
        self,
        requests: Sequence[Request],
        *,
        batch_size: int | None = None,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """The answer to each request, in their order.

        Args:
            batch_size: texts that are worked on together.
            on_done: called with the place of a request and its answer as soon as it has ended.
        """
        if not requests:
            return []
        engine = Engine(
            self.backend,
            self.decode,
            slots=min(batch_size or self.batch_size, len(requests)),
            length=max(map(_room, requests)),
        )
        # The longest first: texts of one length are computed together, and the last ones to end are short.
        order = sorted(range(len(requests)), key=lambda place: -len(requests[place].prompt))
        place_of = {engine.add(requests[place], report=False): place for place in order}
        answers: dict[int, Completion] = {}
        while engine.busy:
            for number, completion, _ in engine.step():
                place = place_of[number]
                answers[place] = completion
                if on_done is not None:
                    on_done(place, completion)
        return [answers[place] for place in range(len(requests))]

    def stream(self, request: Request) -> Iterator[Completion]:
        """The answer as it grows; the last one is finished. A text that begins like the one before (the next turn of a
        conversation) is computed from where they part.
        """
        engine = self._single_engine(_room(request))
        number = engine.add(request)
        try:
            while engine.busy:
                for _, completion, _ in engine.step():
                    yield completion
        finally:
            # Where nobody reads on.
            engine.cancel(number)

    def beam_search(
        self, request: Request, beams: int, *, length_penalty: float = 1.0, sample: bool = False
    ) -> Completion:
        """The most probable answer that a search with so many beams finds; see `beam.beam_search`."""
        from mindspeed_llm.tasks.inference.beam import beam_search

        return beam_search(self, request, beams, length_penalty=length_penalty, sample=sample)

    def loglikelihood(
        self,
        contexts: Sequence[str],
        continuations: Sequence[str],
        *,
        batch_size: int | None = None,
        on_done: Callable[[int, Likelihood], None] | None = None,
    ) -> list[Likelihood]:
        """How probable each continuation is after its context, in their order; see `pairs.encode_pairs` for where the
        one ends and the other begins.

        Args:
            batch_size: the most texts of one forward pass; None: as many as are useful.
            on_done: called with the place of a pair and its likelihood as soon as it is known.

        Raises:
            UserError: a continuation has no token of its own, or more tokens than the model has positions.
        """
        from mindspeed_llm.tasks.inference.likelihood import pair_likelihoods
        from mindspeed_llm.tasks.inference.pairs import encode_pairs

        pairs = encode_pairs(self.tokenizer, contexts, continuations)
        return pair_likelihoods(self.backend, pairs, batch_size=batch_size, on_done=on_done)

    def _special_token(self, text: str) -> int | None:
        """The token that `text` is, where no decoded text has it."""
        if self._vocabulary is None:
            self._vocabulary = self.tokenizer.get_vocab()
        token = self._vocabulary.get(text)
        return token if token is not None and not self.decode([token]) else None

    def _single_engine(self, room: int) -> Engine:
        """An engine for one text of so many tokens: the last one where it is large enough."""
        if self._single is None or self._single.length < min(room, self.max_length) or self._single.busy:
            self._single = None
            self._single = Engine(self.backend, self.decode, slots=1, length=max(room, _ROOM))
        return self._single


def check_room(length: int, positions: int) -> None:
    """Raise UserError where a prompt of `length` tokens leaves no position of a model for an answer."""
    if length >= positions:
        raise UserError(
            f"the prompt has {length} tokens, and the model has {positions} positions for a text with its "
            "answer: no room is left; shorten the prompt"
        )


def _room(request: Request) -> int:
    """Tokens that the text can come to have."""
    return len(request.prompt) + request.max_new_tokens
