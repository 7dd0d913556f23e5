"""The JSON objects of answers, as OpenAI's API has them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mindspeed_llm.tasks.inference.serve.token_texts import TokenEntry, bytes_of


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens that a request has used."""

    prompt_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, int]:
        """The JSON object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, kw_only=True)
class Piece:
    """An answer, or the next part of one that is streamed."""

    index: int
    text: str
    entries: Sequence[TokenEntry] | None
    """The tokens of `text`; None where no log-probabilities are wanted."""
    finish_reason: str | None


class Format(Protocol):
    """How one endpoint writes answers."""

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The response that is not streamed."""
        ...

    def begin(self, index: int) -> dict[str, Any] | None:
        """What comes before the first part of a streamed answer, if anything does."""
        ...

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """A part of a streamed answer."""
        ...

    def last(self, usage: Usage) -> dict[str, Any]:
        """What comes after all parts, where the usage is wanted."""
        ...


class _Envelope:
    """What all objects of one response have in common."""

    def __init__(self, prefix: str, model: str, fingerprint: str | None, *, null_usage: bool) -> None:
        """`null_usage`: chunks name the usage that only the last one has, as OpenAI's do where it is wanted."""
        named = {"system_fingerprint": f"fp_{fingerprint[:12]}"} if fingerprint else {}
        self._fields = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model, **named}
        self._null_usage = {"usage": None} if null_usage else {}

    def whole(self, kind: str, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {**self._fields, "object": kind, "choices": choices, "usage": usage.body()}

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._fields, "object": kind, "choices": choices, **self._null_usage}


class CompletionFormat:
    """/v1/completions."""

    def __init__(self, model: str, fingerprint: str | None, *, with_alternatives: bool, null_usage: bool) -> None:
        """`with_alternatives`: log-probabilities name some, i.e. `logprobs` is above 0."""
        self._envelope = _Envelope("cmpl", model, fingerprint, null_usage=null_usage)
        self._with_alternatives = with_alternatives

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        return self._envelope.whole("text_completion", [self._choice(piece) for piece in pieces], usage)

    def begin(self, index: int) -> None:
        return None

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._envelope.chunk("text_completion", [self._choice(piece)])

    def last(self, usage: Usage) -> dict[str, Any]:
        return self._envelope.whole("text_completion", [], usage)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": None if piece.entries is None else self._logprobs(piece.entries),
            "finish_reason": piece.finish_reason,
        }

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [_by_text(entry) for entry in entries] if self._with_alternatives else None,
            "text_offset": [entry.offset for entry in entries],
        }


def _by_text(entry: TokenEntry) -> dict[str, float] | None:
    """Alternatives by their texts; of several with one text the most probable."""
    if entry.alternatives is None:
        return None
    found: dict[str, float] = {}
    for text, logprob in entry.alternatives:
        found.setdefault(text, logprob)
    # The token itself is always named.
    if entry.logprob is not None:
        found.setdefault(entry.text, entry.logprob)
    return found


class ChatFormat:
    """/v1/chat/completions."""

    def __init__(self, model: str, fingerprint: str | None, *, null_usage: bool) -> None:
        self._envelope = _Envelope("chatcmpl", model, fingerprint, null_usage=null_usage)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": piece.index,
                "message": {"role": "assistant", "content": piece.text, "refusal": None},
                "logprobs": _content_logprobs(piece),
                "finish_reason": piece.finish_reason,
            }
            for piece in pieces
        ]
        return self._envelope.whole("chat.completion", choices, usage)

    def begin(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return self._chunk(piece.index, delta, _content_logprobs(piece), piece.finish_reason)

    def last(self, usage: Usage) -> dict[str, Any]:
        return self._envelope.whole("chat.completion.chunk", [], usage)

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._envelope.chunk("chat.completion.chunk", [choice])


def _content_logprobs(piece: Piece) -> dict[str, Any] | None:
    if piece.entries is None:
        return None
    content = [
        {
            "token": entry.text,
            "logprob": entry.logprob,
            "bytes": bytes_of(entry.text),
            "top_logprobs": [
                {"token": text, "logprob": logprob, "bytes": bytes_of(text)}
                for text, logprob in entry.alternatives or ()
            ],
        }
        for entry in piece.entries
    ]
    return {"content": content, "refusal": None}
