"""The texts of single tokens, for clients that ask for log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mindspeed_llm.tasks.inference.serve.scoring import Alternatives
from mindspeed_llm.tasks.inference.stop_strings import GrowingText

# A token may read differently where a text begins; a few tokens before it settle how.
_CONTEXT = 3
# What OpenAI's servers write for a probability of 0, of which JSON has no logarithm.
_LOWEST_LOGPROB = -9999.0
_UNFINISHED = "\ufffd"

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class TokenEntry:
    """A token in a text."""

    text: str
    """A special token's name; U+FFFD for bytes that are no whole character."""
    logprob: float | None
    """None for the first token of a prompt, which nothing stands before."""
    alternatives: tuple[tuple[str, float], ...] | None
    """(text, logprob) of the most probable tokens in its place, most probable first; None as for `logprob`."""
    offset: int
    """Where its text begins in the text of all tokens."""


def bytes_of(text: str) -> list[int] | None:
    """The bytes of a token's text; None where the text does not show them."""
    return None if _UNFINISHED in text else list(text.encode())


class TokenTexts:
    """The entries of a text's tokens, one after the other."""

    def __init__(self, decode: Decode, name: Decode, *, offset: int = 0, before: Sequence[int] = ()) -> None:
        """
        Args:
            decode: the text of tokens, special ones left out.
            name: the same with the names of special tokens.
            offset: where the text of the first token begins.
            before: the tokens that stand before it.
        """
        self._decode, self._name, self._offset = decode, name, offset
        self._ids = list(before)[-_CONTEXT:]
        self._growing = GrowingText(decode)

    def entries(
        self, ids: Iterable[int], logprobs: Iterable[float | None], alternatives: Iterable[Alternatives | None]
    ) -> list[TokenEntry]:
        """The entries of the next tokens."""
        found = []
        for token, logprob, others in zip(ids, logprobs, alternatives, strict=True):
            base = self._decode(self._ids)
            found.append(
                TokenEntry(
                    text=self._text(base, token),
                    logprob=None if logprob is None else max(logprob, _LOWEST_LOGPROB),
                    alternatives=None
                    if others is None
                    else tuple((self._text(base, other), max(value, _LOWEST_LOGPROB)) for other, value in others),
                    offset=self._offset + len(self._growing.text),
                )
            )
            self._growing.add(token)
            self._ids = [*self._ids, token][-_CONTEXT:]
        return found

    def _text(self, base: str, token: int) -> str:
        """What the token adds behind the last ones, whose text is `base`."""
        whole = self._decode([*self._ids, token])
        text = whole[len(base) :] if whole.startswith(base) else self._decode([token])
        return text or self._name([token])
