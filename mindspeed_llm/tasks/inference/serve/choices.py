"""One choice of a response: its prompt, the work that was handed over for it, and what has been sent of it."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.generation import Completion
from mindspeed_llm.tasks.inference.serve.formats import Piece
from mindspeed_llm.tasks.inference.serve.scoring import Alternatives, Scored
from mindspeed_llm.tasks.inference.serve.token_texts import TokenEntry, TokenTexts
from mindspeed_llm.tasks.inference.serve.worker import Answer


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the parts of a choice come from."""

    echo: str | None
    """The text of the prompt, where it stands in front of the answer."""
    scored: Answer | None
    """The scoring of the prompt's tokens, where they are wanted."""
    generated: Answer | None
    """The answer; None where none is wanted, or where it comes from the scoring."""
    next_is_answer: bool
    """The answer is the one token that the scoring has found to be the most probable."""

    @property
    def answers(self) -> list[Answer]:
        """All work that the choice waits for."""
        return [answer for answer in (self.scored, self.generated) if answer is not None]


class Choice:
    """Gives out a choice piece by piece, or as one where it is asked when all is there."""

    def __init__(self, lm: CausalLM, index: int, prompt: tuple[int, ...], sources: Sources, *, entries: bool) -> None:
        """`entries`: the tokens are wanted as well as the text."""
        self.index = index
        self.is_finished = False
        """All has been given out."""
        self._lm, self._prompt, self._sources = lm, prompt, sources
        self.has_entries = entries
        # Of what has been given out: whether the prompt has, and how much of the answer.
        self._is_begun = sources.echo is None
        self._sent_text = self._sent_tokens = 0
        self._texts: TokenTexts | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all work has ended. Raises ApiError where it has failed."""
        for answer in self._sources.answers:
            answer.check()
        return all(answer.is_finished for answer in self._sources.answers)

    @property
    def completion_tokens(self) -> int:
        """Tokens that have been generated."""
        if self._sources.generated is None:
            return int(self._sources.next_is_answer)
        latest = self._sources.generated.latest
        return len(latest.token_ids) if isinstance(latest, Completion) else 0

    def news(self) -> Piece | None:
        """What there is that has not been given out; None where that is nothing.

        Raises:
            ApiError: the work has failed.
        """
        for answer in self._sources.answers:
            answer.check()
        scored = None if self._sources.scored is None else self._sources.scored.latest
        if self.is_finished or (self._sources.scored is not None and scored is None):
            return None
        assert scored is None or isinstance(scored, Scored)
        text, entries = self._prompt_part(scored)
        reason = None
        if scored is not None and self._sources.next_is_answer:
            more, of_more, reason = self._next_part(scored)
        elif self._sources.generated is None:
            more, of_more, reason = "", [], "length"
        else:
            more, of_more, reason = self._generated_part(self._sources.generated)
        self.is_finished = reason is not None
        text, entries = text + more, entries + of_more
        if not text and not entries and reason is None:
            return None
        return Piece(index=self.index, text=text, entries=entries if self.has_entries else None, finish_reason=reason)

    def _prompt_part(self, scored: Scored | None) -> tuple[str, list[TokenEntry]]:
        if self._is_begun:
            return "", []
        self._is_begun = True
        assert self._sources.echo is not None
        if scored is None:
            return self._sources.echo, []
        texts = TokenTexts(self._lm.decode, self._lm.tokenizer.decode)
        logprobs: list[float | None] = [None, *scored.logprobs]
        alternatives: list[Alternatives | None] = [None, *scored.top_logprobs]
        return self._sources.echo, texts.entries(self._prompt, logprobs, alternatives)

    def _next_part(self, scored: Scored) -> tuple[str, list[TokenEntry], str]:
        ids = [scored.next_token]
        # Named also where it ends the text: clients that ask for prompts' tokens count on exactly one more.
        entries = self._answer_texts().entries(ids, [scored.next_logprob], [scored.next_top_logprobs])
        reason = "stop" if scored.next_token in self._lm.stop_ids else "length"
        return ("" if reason == "stop" else self._lm.decode(ids)), entries, reason

    def _generated_part(self, answer: Answer) -> tuple[str, list[TokenEntry], str | None]:
        latest = answer.latest
        if latest is None:
            return "", [], None
        assert isinstance(latest, Completion)
        reason = latest.finish_reason if answer.is_finished else None
        if not self.has_entries:
            text = latest.text[self._sent_text :]
            self._sent_text = len(latest.text)
            return text, [], reason
        # Tokens whose text is held back may turn out to be of a stop string.
        if reason is None and self._lm.decode(latest.token_ids) != latest.text:
            return "", [], None
        ids, logprobs = latest.token_ids[self._sent_tokens :], latest.logprobs[self._sent_tokens :]
        alternatives = latest.top_logprobs[self._sent_tokens :] or ((),) * len(ids)
        entries = self._answer_texts().entries(ids, logprobs, alternatives)
        text = latest.text[self._sent_text :]
        self._sent_tokens, self._sent_text = len(latest.token_ids), len(latest.text)
        return text, entries, reason

    def _answer_texts(self) -> TokenTexts:
        if self._texts is None:
            offset = len(self._sources.echo or "")
            self._texts = TokenTexts(self._lm.decode, self._lm.tokenizer.decode, offset=offset, before=self._prompt)
        return self._texts
