"""The two endpoints that generate: from a request to work for the model, and from its results to a response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.generation import Request, Sampling
from mindspeed_llm.tasks.inference.prompt_format import PromptFormat
from mindspeed_llm.tasks.inference.serve.asked import Asked, parse_chat, parse_completion
from mindspeed_llm.tasks.inference.serve.choices import Choice, Sources
from mindspeed_llm.tasks.inference.serve.errors import ApiError, bad_field, too_long
from mindspeed_llm.tasks.inference.serve.exchange import Exchange
from mindspeed_llm.tasks.inference.serve.fields import Fields
from mindspeed_llm.tasks.inference.serve.formats import ChatFormat, CompletionFormat, Format, Piece, Usage
from mindspeed_llm.tasks.inference.serve.scoring import Scoring
from mindspeed_llm.tasks.inference.serve.ticks import Work
from mindspeed_llm.tasks.inference.serve.worker import Answer, Worker
from mindspeed_llm.tasks.preprocess.records import Conversation

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """A prompt as tokens, with its text where the response repeats it."""

    ids: tuple[int, ...]
    echo: str | None = None


class Endpoints:
    """Answers requests that name the model."""

    def __init__(self, lm: CausalLM, worker: Worker, template: PromptFormat | None, *, model: str, length: int) -> None:
        """
        Args:
            template: how conversations become prompts; None where there is no way.
            model: its name for clients.
            length: tokens of a prompt and its answer together, at most.
        """
        self.model, self.length = model, length
        self._lm, self._worker, self._template = lm, worker, template
        # One thread for tokenizers: not all of them may be used by several, and the server goes on meanwhile.
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="texts")

    def close(self) -> None:
        """End the thread for texts."""
        self._texts.shutdown(wait=False, cancel_futures=True)

    async def completions(self, exchange: Exchange, fields: Fields) -> Usage:
        """POST /v1/completions."""
        asked = parse_completion(fields, self._lm.backend.vocab_size)
        common = asked.common
        prompts = await self._in_texts(lambda: [self._prompt(text, asked.echo) for text in asked.prompts])
        form = CompletionFormat(
            self.model,
            self._lm.fingerprint,
            with_alternatives=bool(common.top_logprobs),
            null_usage=common.stream and common.include_usage,
        )
        return await self._answer(exchange, _Plan(self._lm, self.length, common, "prompt"), prompts, form)

    async def chat_completions(self, exchange: Exchange, fields: Fields) -> Usage:
        """POST /v1/chat/completions."""
        asked = parse_chat(fields)
        template = self._template
        if template is None:
            raise ApiError(
                400,
                "the model has no chat template, so that it can only continue texts (/v1/completions); --prompt-type "
                "gives the server one",
                code="no_chat_template",
            )
        ids = await self._in_texts(lambda: _rendered(template, asked.conversation))
        common = replace(asked.common, stop=(*asked.common.stop, *template.stop_words))
        form = ChatFormat(
            self.model, self._lm.fingerprint, null_usage=asked.common.stream and asked.common.include_usage
        )
        plan = _Plan(self._lm, self.length, common, "messages")
        return await self._answer(exchange, plan, [_Prompt(ids=ids)], form)

    async def _in_texts(self, function: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._texts, function)

    def _prompt(self, prompt: str | tuple[int, ...], echo: bool) -> _Prompt:
        if isinstance(prompt, str):
            return _Prompt(ids=tuple(self._lm.encode(prompt)), echo=prompt if echo else None)
        return _Prompt(ids=prompt, echo=self._lm.decode(prompt) if echo else None)

    async def _answer(self, exchange: Exchange, plan: _Plan, prompts: Sequence[_Prompt], form: Format) -> Usage:
        """Hand the work over, and give out what comes of it; whatever ends this ends the work."""
        changed, common = asyncio.Event(), plan.common
        for prompt in prompts:
            plan.add(prompt)
        answers = self._worker.submit(plan.works, changed)
        try:
            choices = plan.choices(answers)
            if common.stream:
                await self._stream(exchange, choices, changed, form)
            else:
                pieces = await self._all(choices, changed)
            usage = Usage(
                prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
                completion_tokens=sum(choice.completion_tokens for choice in choices),
            )
            if not common.stream:
                await exchange.reply(200, form.whole(pieces, usage))
            else:
                if common.include_usage:
                    await exchange.event(_json(form.last(usage)))
                await exchange.end_events()
            return usage
        finally:
            self._worker.abandon(answers)

    async def _all(self, choices: Sequence[Choice], changed: asyncio.Event) -> list[Piece]:
        while not all([choice.is_complete for choice in choices]):
            await changed.wait()
            changed.clear()
        return await self._news(choices)

    async def _news(self, choices: Sequence[Choice]) -> list[Piece]:
        """What there is that has not been given out."""

        def found() -> list[Piece]:
            return [piece for choice in choices if (piece := choice.news()) is not None]

        # The texts of single tokens take many calls of the tokenizer.
        return await self._in_texts(found) if any(choice.has_entries for choice in choices) else found()

    async def _stream(
        self, exchange: Exchange, choices: Sequence[Choice], changed: asyncio.Event, form: Format
    ) -> None:
        begun: set[int] = set()
        going = list(choices)
        while going:
            for piece in await self._news(going):
                if piece.index not in begun and (first := form.begin(piece.index)) is not None:
                    await exchange.event(_json(first))
                begun.add(piece.index)
                await exchange.event(_json(form.chunk(piece)))
            going = [choice for choice in going if not choice.is_finished]
            if going:
                await changed.wait()
                changed.clear()


class _Plan:
    """The work of a request, and which of its choices waits for which."""

    def __init__(self, lm: CausalLM, length: int, common: Asked, field: str) -> None:
        """`length`: tokens of a prompt and its answer, at most; `field` has the prompts, for messages."""
        self.common = common
        self.works: list[Work] = []
        self._lm, self._length, self._field = lm, length, field
        # (prompt, place of the scoring, place of the generation, whether the scoring brings the answer), per choice.
        self._parts: list[tuple[_Prompt, int | None, int | None, bool]] = []

    def add(self, prompt: _Prompt) -> None:
        """Plan the choices of one prompt. Raises ApiError where it cannot be answered."""
        common, scoring = self.common, None
        new = self._room(prompt)
        if prompt.echo is not None and common.top_logprobs is not None:
            scoring = self._work(Scoring(prompt=prompt.ids, top_logprobs=common.top_logprobs))
        for sampling in common.samplings:
            # The scoring knows the most probable token that follows: what lm-eval asks for need not be done twice.
            next_is_answer = scoring is not None and new == 1 and not common.stop and _is_plain_greedy(sampling)
            generated = None
            if new and not next_is_answer:
                generated = self._work(self._request(prompt, sampling, new))
            self._parts.append((prompt, scoring, generated, next_is_answer))

    def choices(self, answers: Sequence[Answer]) -> list[Choice]:
        """The choices, with the answers to `works`."""
        return [
            Choice(
                self._lm,
                index,
                prompt.ids,
                Sources(
                    echo=prompt.echo,
                    scored=None if scoring is None else answers[scoring],
                    generated=None if generated is None else answers[generated],
                    next_is_answer=next_is_answer,
                ),
                entries=self.common.top_logprobs is not None,
            )
            for index, (prompt, scoring, generated, next_is_answer) in enumerate(self._parts)
        ]

    def _work(self, work: Work) -> int:
        self.works.append(work)
        return len(self.works) - 1

    def _room(self, prompt: _Prompt) -> int:
        """How many tokens the answer may have."""
        length, vocab_size = self._length, self._lm.backend.vocab_size
        if not prompt.ids:
            raise bad_field(self._field, "is empty; expected at least one token")
        if max(prompt.ids) >= vocab_size:
            raise bad_field(
                self._field,
                f"the tokenizer has token {max(prompt.ids)}, the model has {vocab_size}; leave that one out",
            )
        new = self.common.max_new_tokens
        if new is None:
            new = max(length - len(prompt.ids), 1)
        if len(prompt.ids) + new > length:
            raise too_long(self._field, len(prompt.ids), new, length)
        return new

    def _request(self, prompt: _Prompt, sampling: Sampling, new: int) -> Request:
        return self._lm.request(
            prompt.ids,
            max_new_tokens=new,
            stop=self.common.stop,
            sampling=sampling,
            top_logprobs=self.common.top_logprobs or 0,
        )


def _rendered(template: PromptFormat, conversation: Conversation) -> tuple[int, ...]:
    try:
        return tuple(template.prompt_ids(conversation))
    except UserError as error:
        raise ApiError(400, f"messages: {error}", param="messages", code="invalid_value") from error


def _is_plain_greedy(sampling: Sampling) -> bool:
    return not sampling.do_sample and sampling.repetition_penalty == 1.0


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
