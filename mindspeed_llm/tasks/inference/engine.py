"""Continuous batching: many texts are continued together, and one that ends makes room for the next at once.

All decisions follow from the requests, their order and the logits alone, so that ranks that share a copy of a model and
make the same calls take the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.backend import Backend, Batch
from mindspeed_llm.tasks.inference.damage import refuse_damaged
from mindspeed_llm.tasks.inference.generation import Completion, Request
from mindspeed_llm.tasks.inference.sampling import choose
from mindspeed_llm.tasks.inference.slots import SHORTEST_PREFIX, Slots, common
from mindspeed_llm.tasks.inference.stop_strings import Decode
from mindspeed_llm.tasks.inference.text_in_work import TextInWork

PREFILL_TOKENS = 4096
"""Prompts are computed together up to so many tokens, which bounds the memory that they take beside the cache."""
_LOOK_AHEAD = 64
"""So many waiting prompts are looked at for one that fits."""
_PADDING = 16
"""Prompts whose lengths differ by no more than this, or by an eighth, are computed together."""

Progress = tuple[int, Completion, bool]
"""(number of a request, its completion so far, whether it is finished)."""


class Engine:
    """Continues the texts of requests, so many at once as there are slots."""

    def __init__(self, backend: Backend, decode: Decode, *, slots: int, length: int | None = None) -> None:
        """Makes a cache of so many slots of `length` positions (None: as many as the model has).

        Args:
            decode: the text of token ids, special tokens left out.

        Raises:
            UserError: the memory for the cache is not there.
        """
        self.length = backend.max_length if length is None else min(length, backend.max_length)
        self._backend = backend
        self._decode = decode
        self._slots = Slots(backend.new_cache(slots, self.length))
        self._waiting: deque[TextInWork] = deque()
        self._running: list[TextInWork] = []
        self._next_number = 0

    @property
    def busy(self) -> bool:
        """Whether a request is not finished."""
        return bool(self._waiting or self._running)

    def add(self, request: Request, *, report: bool = True) -> int:
        """Queue a request; its number. With `report` `step` tells of each of its tokens, else of its end alone, which
        saves decoding text that nobody reads.

        Raises:
            UserError: the prompt is empty, leaves no room, or is of tokens that there are not; a sampling parameter is
                out of range.
        """
        prompt = request.prompt
        if not prompt:
            raise UserError("the prompt has no tokens; a text to continue needs at least one")
        if min(prompt) < 0 or max(prompt) >= self._backend.vocab_size:
            raise UserError(
                f"the prompt has token ids from {min(prompt)} to {max(prompt)}; the model's are from 0 to "
                f"{self._backend.vocab_size - 1}"
            )
        if request.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {request.max_new_tokens}; expected at least 1")
        if len(prompt) >= self.length:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, and there is room for {self.length} with its answer; shorten it"
            )
        text = TextInWork(self._next_number, request, length=self.length, decode=self._decode, report=report)
        self._next_number += 1
        self._waiting.append(text)
        return text.number

    def cancel(self, number: int) -> None:
        """Forget a request; its slot is free at once. Nothing happens where it has ended."""
        for text in self._running:
            if text.number == number:
                self._end(text)
        self._waiting = deque(text for text in self._waiting if text.number != number)

    def step(self) -> list[Progress]:
        """One forward pass: the first token of prompts that have waited, where a slot is free, else one token more of
        each text. Tells what came of it.
        """
        if self._waiting and self._slots.free:
            return self._advance(self._begin())
        self._close_gaps()
        return self._advance(self._running) if self._running else []

    def _begin(self) -> list[TextInWork]:
        """Waiting texts that are computed together, in slots of their own: the first, and those that are as long."""
        chosen: list[TextInWork] = []
        widths: list[int] = []
        passed_over: list[TextInWork] = []
        while self._waiting and self._slots.free and len(passed_over) < _LOOK_AHEAD:
            text = self._waiting.popleft()
            prefix = self._slots.prefix(text.prompt)
            width = len(text.prompt) - prefix.length
            # What a text has in common with one of those chosen is there for it in the next step.
            if chosen and not (
                _are_alike([*widths, width])
                and all(common(text.prompt, other.prompt) < prefix.length + SHORTEST_PREFIX for other in chosen)
            ):
                passed_over.append(text)
                continue
            text.slot = self._slots.take(text.prompt, prefix)
            chosen.append(text)
            widths.append(width)
        self._waiting.extendleft(reversed(passed_over))
        self._running += chosen
        return chosen

    def _close_gaps(self) -> None:
        """Move texts into the first slots, where fewer are left than there are slots: what attention reads of the cache
        is then one block, and need not be gathered at each step.
        """
        gaps = sorted(slot for slot in self._slots.free if slot < len(self._running))
        moved = [text for text in self._running if text.slot >= len(self._running)]
        for text, gap in zip(moved, gaps, strict=True):
            self._slots.move(text.slot, gap)
            text.slot = gap

    def _advance(self, texts: Sequence[TextInWork]) -> list[Progress]:
        """One forward pass over what of the texts is not computed, and the next token of each."""
        texts = sorted(texts, key=lambda text: text.slot)
        starts = [self._slots.filled(text.slot) for text in texts]
        new = [text.tokens_to_compute(start) for text, start in zip(texts, starts, strict=True)]
        widths = [len(tokens) for tokens in new]
        batch = Batch(
            tokens=_filled_up(new, max(widths)),
            widths=widths,
            slots=[text.slot for text in texts],
            starts=starts,
            wanted=[(row, width - 1) for row, width in enumerate(widths)],
        )
        logits = self._backend.forward(batch, self._slots.cache)
        for text, tokens in zip(texts, new, strict=True):
            self._slots.fill(text.slot, tokens)
        return self._take_tokens(texts, logits)

    def _take_tokens(self, texts: list[TextInWork], logits: Tensor) -> list[Progress]:
        logarithms = logits.logsumexp(dim=-1)
        refuse_damaged(logarithms)
        tokens = choose(logits, [text.sampler for text in texts])
        logprobs = (logits.gather(-1, tokens[:, None])[:, 0] - logarithms).tolist()
        progress: list[Progress] = []
        for row, (text, token, logprob) in enumerate(zip(texts, tokens.tolist(), logprobs, strict=True)):
            count = text.request.top_logprobs
            top = _most_probable(logits[row], logarithms[row], count) if count else ()
            text.add(token, logprob, top)
            if text.finish_reason is not None:
                self._end(text)
            if text.finish_reason is not None or text.report:
                progress.append((text.number, text.completion(), text.finish_reason is not None))
        return progress

    def _end(self, text: TextInWork) -> None:
        self._running = [other for other in self._running if other is not text]
        self._slots.give_back(text.slot)


def _are_alike(widths: Sequence[int]) -> bool:
    """Whether prompts with so many tokens to compute are worth being computed together."""
    wide = max(widths)
    return len(widths) * wide <= PREFILL_TOKENS and wide - min(widths) <= max(_PADDING, wide // 8)


def _filled_up(rows: Sequence[Sequence[int] | np.ndarray], width: int) -> Tensor:
    """Rows of token ids as a tensor [rows, width], int64, filled up on the right with token 0."""
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    return torch.from_numpy(tokens)


def _most_probable(logits: Tensor, logarithm: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """(token, logprob) of the `count` most probable tokens of one row of logits [V]."""
    values, tokens = logits.topk(min(count, len(logits)))
    return tuple(zip(tokens.tolist(), (values - logarithm).tolist(), strict=True))
