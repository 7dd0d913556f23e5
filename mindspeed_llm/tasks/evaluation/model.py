"""A causal language model as benchmarks ask it: prompts in the form that the flags name, greedy answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.evaluation.requests import Answer, Generate, LogLikelihood, Question

if TYPE_CHECKING:
    from mindspeed_llm.tasks.inference.causal_lm import CausalLM
    from mindspeed_llm.tasks.inference.generation import Completion
    from mindspeed_llm.tasks.inference.likelihood import Likelihood
    from mindspeed_llm.tasks.inference.pairs import Pair
    from mindspeed_llm.tasks.inference.prompt_format import PromptFormat

_PROBE = "Question?"
_THOUGHTS_BEGIN, THOUGHTS_END = "<think>", "</think>"
_TAIL = 16
"""Tokens at the end of a prompt that are enough to see whether it opens a thought."""


def check_room(positions: int, max_new_tokens: int) -> int:
    """The tokens that a prompt may have before an answer. Raises UserError: none."""
    if positions <= max_new_tokens:
        raise UserError(
            f"the model has {positions} positions, which leave no room for a prompt before an answer of "
            f"{max_new_tokens} tokens; make answers shorter with --max-new-tokens"
        )
    return positions - max_new_tokens


class EvaluatedModel:
    """See `run.LoadedModel`.

    In a conversation a prompt is one message of the user, examples included, and continuations begin the reply: without
    the blank that parts them from a plain prompt, and with tokens of their own.

    Models that think first are read behind their thoughts; behind a thought without an end there is nothing. The
    benchmark's stop strings do not end what they write, as they would end the first line of a thought: its reply is cut
    at them afterwards, where it has begun.
    """

    def __init__(
        self,
        lm: CausalLM,
        template: PromptFormat | None,
        *,
        description: str,
        fingerprint: str | None,
        decisive: Mapping[str, Any],
        texts_at_once: int | None = None,
        may_think: bool = True,
    ) -> None:
        """
        Args:
            template: the form of prompts; None: as they are.
            description: what was loaded, the same on any number of ranks.
            fingerprint: hash of its weights; None where there is none.
            decisive: how the model computes, besides its weights.
            texts_at_once: the most that likelihoods are computed of in one forward pass; None: as many as are useful.
            may_think: whether a model that knows how to think does so in a conversation.
        """
        self._lm, self._template, self._texts_at_once = lm, template, texts_at_once
        self.thinks = template is not None and may_think and THOUGHTS_END in lm.tokenizer.get_vocab()
        self.replica, self.replicas = lm.backend.replica, lm.backend.replicas
        self.is_first_of_replica = lm.backend.is_first_of_replica
        self.batch_size, self.max_length = lm.batch_size, lm.max_length
        self.description, self.fingerprint = description, fingerprint
        self.decisive: Mapping[str, Any] = {
            **decisive,
            "chat_template": None if template is None else template.name,
            "batch_size": lm.batch_size,
            "texts_at_once": texts_at_once,
            # The template itself, with whatever flags have a part in it.
            "asked_as": lm.tokenizer.decode(self._ids(_PROBE)),
        }

    def close(self) -> None:
        """Let go of what the backend was set up with."""
        close = getattr(self._lm.backend, "close", None)
        if close is not None:
            close()

    def encode(self, text: str) -> Sequence[int]:
        """The token ids of a prompt."""
        return self._ids(text)

    def shown(self, prompt: str) -> str:
        """The prompt as it is, or the conversation around it with its special tokens."""
        return prompt if self._template is None else self._lm.tokenizer.decode(self._ids(prompt))

    def answer(self, asked: Sequence[Question], on_answer: Callable[[int, Answer], None]) -> None:
        """Answer all questions; see `requests.Model`.

        Raises:
            UserError: the model has too few positions for an answer.
        """
        written = [(place, question) for place, question in enumerate(asked) if isinstance(question, Generate)]
        chosen = [(place, question) for place, question in enumerate(asked) if isinstance(question, LogLikelihood)]
        if chosen:
            self._choose(chosen, on_answer)
        if written:
            self._write(written, on_answer)

    def _ids(self, prompt: str) -> list[int]:
        return self._lm.encode(prompt) if self._template is None else self._template.question_ids(prompt)

    def _choose(self, asked: Sequence[tuple[int, LogLikelihood]], on_answer: Callable[[int, Answer], None]) -> None:
        from mindspeed_llm.tasks.inference.likelihood import row_likelihoods
        from mindspeed_llm.tasks.inference.pairs import to_row

        pairs = self._pairs([question for _, question in asked])
        rows = [to_row(pair, self.max_length) for pair in pairs]
        owners = [number for number, (_, question) in enumerate(asked) for _ in question.continuations]
        firsts = [0] * len(asked)
        cut = [0] * len(asked)
        for place in reversed(range(len(owners))):
            firsts[owners[place]] = place
        for pair, owner in zip(pairs, owners, strict=True):
            over = len(pair.context) + len(pair.continuation) - (self.max_length + 1)
            cut[owner] = max(cut[owner], over)
        values = [0.0] * len(rows)
        waiting = Counter(owners)

        def on_done(number: int, likelihood: Likelihood) -> None:
            values[number] = likelihood.logprob
            owner = owners[number]
            waiting[owner] -= 1
            if not waiting[owner]:
                place, question = asked[owner]
                first = firsts[owner]
                on_answer(
                    place,
                    Answer(raw=tuple(values[first : first + len(question.continuations)]), cut_tokens=cut[owner]),
                )

        row_likelihoods(self._lm.backend, rows, batch_size=self._texts_at_once, on_done=on_done)

    def _pairs(self, questions: Sequence[LogLikelihood]) -> list[Pair]:
        from mindspeed_llm.tasks.inference.pairs import Pair, encode_pairs

        if self._template is None:
            both = [(question.context, text) for question in questions for text in question.continuations]
            return encode_pairs(self._lm.tokenizer, [context for context, _ in both], [text for _, text in both])
        pairs = []
        for question in questions:
            context = tuple(self._template.question_ids(question.context))
            texts = [text.removeprefix(" ") for text in question.continuations]
            encoded = self._lm.tokenizer.encode_batch(texts, add_special_tokens=False)
            pairs += [Pair(context=context, continuation=tuple(ids)) for ids in encoded]
        return pairs

    def _write(self, asked: Sequence[tuple[int, Generate]], on_answer: Callable[[int, Answer], None]) -> None:
        requests, cut, opened = [], [], []
        stop_words = self._template.stop_words if self._template is not None else ()
        for _, question in asked:
            room = check_room(self.max_length, question.max_new_tokens)
            ids = self._ids(question.prompt)
            cut.append(max(0, len(ids) - room))
            opened.append(self.thinks and self._lm.tokenizer.decode(ids[-_TAIL:]).rstrip().endswith(_THOUGHTS_BEGIN))
            stop = stop_words if self.thinks else (*question.stop, *stop_words)
            requests.append(self._lm.request(ids[cut[-1] :], max_new_tokens=question.max_new_tokens, stop=stop))

        def on_done(number: int, completion: Completion) -> None:
            text = completion.text
            begins_at, has_no_end = 0, False
            if self.thinks and THOUGHTS_END in text:
                reply = text.rpartition(THOUGHTS_END)[2].lstrip()
                begins_at = len(text) - len(reply)
            elif self.thinks and (opened[number] or text.lstrip().startswith(_THOUGHTS_BEGIN)):
                # Not every text without the mark: models that know it may also answer without a thought.
                begins_at, has_no_end = len(text), True
            if self.thinks:
                text = text[: _first_of(asked[number][1].stop, text, begins_at)]
            on_answer(
                asked[number][0],
                Answer(raw=text, begins_at=begins_at, thought_has_no_end=has_no_end, cut_tokens=cut[number]),
            )

        self._lm.generate(requests, batch_size=self.batch_size, on_done=on_done)


def _first_of(strings: Sequence[str], text: str, start: int) -> int:
    """Where the first of the strings stands in a text behind a place; its end where none does."""
    places = (text.find(string, start) for string in strings if string)
    return min((place for place in places if place >= 0), default=len(text))
