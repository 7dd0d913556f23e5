"""A request and what there is of its answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindspeed_llm.tasks.inference.generation import Completion, FinishReason, Request
from mindspeed_llm.tasks.inference.sampling import Sampler
from mindspeed_llm.tasks.inference.stop_strings import Decode, GrowingText, certain_length, first_stop


class TextInWork:
    """The text of a request, which ends at one of its stop tokens, in front of one of its stop strings, or where there
    is no more room.
    """

    def __init__(self, number: int, request: Request, *, length: int, decode: Decode, report: bool) -> None:
        """`length`: how many tokens the text can have, the prompt's included. `report`: its text is wanted before it
        has ended.
        """
        self.number = number
        self.request = request
        self.report = report
        self.prompt = np.array(request.prompt, dtype=np.int64)
        self.sampler = Sampler(request.sampling, request.prompt)
        self.slot = -1
        self.finish_reason: FinishReason | None = None
        self._decode = decode
        self._most_tokens = min(request.max_new_tokens, length - len(request.prompt))
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[tuple[tuple[int, float], ...]] = []
        self._stop_strings = tuple(string for string in request.stop_strings if string)
        self._growing = GrowingText(decode) if report or self._stop_strings else None
        self._checked = 0
        self._text: str | None = None
        """Once it is known for good."""

    def tokens_to_compute(self, start: int) -> Sequence[int] | np.ndarray:
        """The tokens from position `start` on: of the prompt before there is an answer, then of the answer."""
        answer_start = start - len(self.prompt)
        return self._ids[answer_start:] if answer_start >= 0 else self.prompt[start:]

    def add(self, token: int, logprob: float, top: tuple[tuple[int, float], ...] = ()) -> None:
        """The model's next token; `top`: alternatives to it."""
        if token in self.request.stop_ids:
            self._finish("stop")
            return
        self._ids.append(token)
        self._logprobs.append(logprob)
        if self.request.top_logprobs:
            self._top.append(top)
        self.sampler.add(token)
        if self._growing is not None:
            self._growing.add(token)
            if self._stop_strings and self._ended_by_string(self._growing.text):
                return
        if len(self._ids) == self._most_tokens:
            self._finish("length")

    def completion(self) -> Completion:
        """What there is. Before the end, text that may be the beginning of a stop string or of a character is left out;
        its tokens are not.
        """
        if self._text is not None:
            text = self._text
        else:
            assert self._growing is not None
            text = self._growing.text
            text = text[: certain_length(text, self._stop_strings)]
        return Completion(
            token_ids=tuple(self._ids),
            text=text,
            logprobs=tuple(self._logprobs),
            finish_reason=self.finish_reason,
            top_logprobs=tuple(self._top),
        )

    def _finish(self, reason: FinishReason) -> None:
        text = self._decode(self._ids)
        if self._stop_strings and self._ended_by_string(text):
            return
        self._text = text
        self.finish_reason = reason

    def _ended_by_string(self, text: str) -> bool:
        """End the answer in front of a stop string, where its text has one."""
        place = first_stop(text, self._stop_strings, checked=self._checked)
        self._checked = len(text)
        if place is None:
            return False
        assert self._growing is not None
        count = self._growing.tokens_before(place)
        del self._ids[count:], self._logprobs[count:], self._top[count:]
        self._text = text[:place]
        self.finish_reason = "stop"
        return True
