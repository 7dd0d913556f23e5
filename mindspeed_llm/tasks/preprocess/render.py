"""Conversation + template -> turns of token ids.

A turn is a source (what the model reads) and a target (what it is trained to write). The text pieces of a turn are
tokenized one by one, special tokens are single ids. `TemplateRenderer` does it for templates given as data;
`chat_template.ChatTemplateRenderer` has the same methods for a tokenizer's own template.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.layouts import PieceTurn, RenderOptions, make_layout
from mindspeed_llm.tasks.preprocess.records import Conversation, Message
from mindspeed_llm.tasks.preprocess.templates import Piece, SpecialToken, Template
from mindspeed_llm.tasks.preprocess.tokenizers import as_tokenizer


@dataclass(frozen=True)
class Turn:
    """Token ids of one turn; `train` False keeps its target out of the loss (the record said so).

    `has_reply` False: nothing is replied here, it is the end of a prompt or text behind the last reply. A reply without
    text may have no target either.
    """

    source: list[int]
    target: list[int]
    train: bool = True
    has_reply: bool = True


class Renderer(Protocol):
    """Turns conversations into token ids.

    `efficient_eos_id` is the id that closes a reply through the label of the next turn's first token, or None where
    replies carry their end marker. `runs_in_threads` says that most of the time goes to a tokenizer that leaves other
    threads running.
    """

    efficient_eos_id: int | None
    runs_in_threads: bool

    def turns(self, conversation: Conversation) -> list[Turn]:
        """Token ids of the conversation, turn by turn, untruncated."""
        ...

    def turns_batch(self, conversations: Sequence[Conversation]) -> list[list[Turn]]:
        """`turns` of many conversations, tokenized together."""
        ...

    def pair_turns(self, prompt: Conversation, chosen: Message, rejected: Message) -> tuple[list[Turn], list[Turn]]:
        """Turns of `prompt`, which ends in a source turn, with either reply; the prompt is the same on both sides."""
        ...

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation that ends in a source turn, up to where the model begins its reply."""
        ...


class TemplateRenderer:
    """Render with a template given as data.

    The options are those of `layouts.RenderOptions`; templates of models that do not reason ignore `enable_thinking`.
    Raises UserError for an effort that the template does not name, and for tokens that the tokenizer lacks.
    """

    def __init__(
        self,
        template: Template,
        tokenizer: Any,
        *,
        enable_thinking: bool | None = None,
        drop_thinking: bool = True,
        reasoning_effort: str | None = None,
    ) -> None:
        self.template, self._tokenizer = template, as_tokenizer(tokenizer)
        if reasoning_effort is not None and reasoning_effort not in template.efforts:
            known = ", ".join(template.efforts)
            raise UserError(
                f"--reasoning-effort {reasoning_effort}: template {template.name!r} "
                + (f"knows {known}" if known else "knows none, leave it out")
            )
        options = RenderOptions(
            enable_thinking=enable_thinking, drop_thinking=drop_thinking, reasoning_effort=reasoning_effort
        )
        self._layout = make_layout(template, options)
        self._special_ids: dict[str, int] = {}
        if template.replace_eos:
            self._special_ids["eos_token"] = self._token_id(template.stop_words[0])
        # Looked up now, so that a missing token is reported before any record is read.
        for slot in (template.prefix, template.system, template.user, template.assistant, template.function):
            for piece in slot.pieces:
                if isinstance(piece, SpecialToken):
                    self._special_id(piece.name)
        self.efficient_eos_id = self._special_id("eos_token") if template.efficient_eos else None
        self.runs_in_threads = self._tokenizer.runs_in_threads

    def pieces(self, conversation: Conversation) -> Iterator[PieceTurn]:
        """Yield (source pieces, target pieces, the reply) for each turn.

        A conversation that ends in a source turn ends in a turn without target, whose reply is None.
        """
        return self._layout.pieces(conversation)

    def turns(self, conversation: Conversation) -> list[Turn]:
        return self.turns_batch([conversation])[0]

    def turns_batch(self, conversations: Sequence[Conversation]) -> list[list[Turn]]:
        return self._encode([list(self._layout.pieces(conversation)) for conversation in conversations])

    def pair_turns(self, prompt: Conversation, chosen: Message, rejected: Message) -> tuple[list[Turn], list[Turn]]:
        sides = [replace(prompt, messages=[*prompt.messages, reply]) for reply in (chosen, rejected)]
        pieces = [list(self._layout.pieces(side, one_turn=True)) for side in sides]
        if _sources(pieces[0]) != _sources(pieces[1]):
            # One reply has a thought, the other an empty one in its prompt. The probabilities of two replies can only
            # be compared after the same prompt.
            pieces = [list(self._layout.pieces(side, one_turn=True, empty_in_target=True)) for side in sides]
        chosen_turns, rejected_turns = self._encode(pieces)
        return chosen_turns, rejected_turns

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        (turns,) = self._encode([list(self._layout.pieces(conversation, one_turn=True))])
        return [token for turn in turns for token in (*turn.source, *turn.target)]

    def _encode(self, conversations: list[list[PieceTurn]]) -> list[list[Turn]]:
        parts = (part for turns in conversations for source, target, _ in turns for part in (source, target))
        texts = list(dict.fromkeys(piece for part in parts for piece in part if isinstance(piece, str)))
        encoded = dict(zip(texts, self._tokenizer.encode_batch(texts, add_special_tokens=False), strict=True))

        def ids(pieces: list[Piece]) -> list[int]:
            found: list[int] = []
            for piece in pieces:
                if isinstance(piece, str):
                    found += encoded[piece]
                elif (token_id := self._special_id(piece.name)) is not None:
                    found.append(token_id)
            return found

        return [
            [
                Turn(ids(source), ids(target), reply is None or reply.loss, reply is not None)
                for source, target, reply in turns
            ]
            for turns in conversations
        ]

    def _special_id(self, name: str) -> int | None:
        if name not in self._special_ids:
            if name == "bos_token":
                return self._tokenizer.bos_token_id
            if name == "eos_token":
                if self._tokenizer.eos_token_id is None:
                    raise UserError(
                        f"template {self.template.name!r} ends replies with the tokenizer's eos token, but the "
                        "tokenizer has none; name one in its tokenizer_config.json"
                    )
                return self._tokenizer.eos_token_id
            self._special_ids[name] = self._token_id(name)
        return self._special_ids[name]

    def _token_id(self, token: str) -> int:
        token_id = self._tokenizer.get_vocab().get(token)
        if token_id is None:
            raise UserError(
                f"template {self.template.name!r} needs the token {token!r}, which the tokenizer does not have; choose "
                "the template of the model, or use a tokenizer that has the token (the FSDP2 backend adds tokens with "
                "model.add_special_tokens)"
            )
        return token_id


def _sources(turns: Sequence[PieceTurn]) -> list[list[Piece]]:
    return [source for source, _, _ in turns]
