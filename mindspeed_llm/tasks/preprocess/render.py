"""Conversation + template -> turns: the text of each turn, and its token ids.

A turn is a source (what the model reads) and a target (what it is trained to write). The text pieces of a turn are
tokenized one by one, special tokens are single ids. `TemplateRenderer` does it for templates given as data;
`chat_template.ChatTemplateRenderer` has the same method for a tokenizer's own template.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.records import SOURCE_ROLES, TARGET_ROLES, Conversation, Message
from mindspeed_llm.tasks.preprocess.templates import Piece, SpecialToken, Template
from mindspeed_llm.tasks.preprocess.tool_formats import TOOL_FORMATS, parse_calls, parse_tools


@dataclass(frozen=True)
class Turn:
    """Token ids of one turn; `train` False keeps its target out of the loss (the record said so)."""

    source: list[int]
    target: list[int]
    train: bool = True


class Renderer(Protocol):
    """Turns conversations into token ids.

    `efficient_eos_id` is the id that closes a reply through the label of the next turn's first token, or None where
    replies carry their end marker.
    """

    efficient_eos_id: int | None

    def turns(self, conversation: Conversation) -> list[Turn]:
        """Token ids of the conversation, turn by turn, untruncated."""
        ...

    def turns_batch(self, conversations: Sequence[Conversation]) -> list[list[Turn]]:
        """`turns` of many conversations, tokenized together."""
        ...

    def pair_turns(self, prompt: Conversation, chosen: Message, rejected: Message) -> tuple[list[Turn], list[Turn]]:
        """Turns of `prompt`, which ends in a source turn, with either reply: each side is a conversation of its own,
        since the prompt may depend on the reply (an empty thought in it).
        """
        ...

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation that ends in a source turn, up to where the model begins its reply."""
        ...


PieceTurn = tuple[list[Piece], list[Piece], Message | None]
"""(source, target, the reply); the reply is None in the last turn of a conversation that ends in a source turn."""


class TemplateRenderer:
    """Render with a template given as data.

    `enable_thinking` (reasoning templates only): True puts an empty thought in front of replies without one, False
    removes thoughts from replies and puts the empty thought into the prompt, None keeps replies as they are and puts
    the empty thought of those without one into the prompt.
    """

    def __init__(self, template: Template, tokenizer: Any, *, enable_thinking: bool | None = None) -> None:
        self.template, self._tokenizer, self._thinking = template, tokenizer, enable_thinking
        self._special_ids: dict[str, int] = {}
        if template.replace_eos:
            self._special_ids["eos_token"] = self._token_id(template.stop_words[0])
        # Looked up now, so that a missing token is reported before any record is read.
        for piece in (*template.assistant.pieces, *template.function.pieces):
            if isinstance(piece, SpecialToken):
                self._special_id(piece.name)
        self.efficient_eos_id = self._special_id("eos_token") if template.efficient_eos else None

    def turns(self, conversation: Conversation) -> list[Turn]:
        return self.turns_batch([conversation])[0]

    def turns_batch(self, conversations: Sequence[Conversation]) -> list[list[Turn]]:
        return self._encode_turns([list(self.pieces(conversation)) for conversation in conversations])

    def pair_turns(self, prompt: Conversation, chosen: Message, rejected: Message) -> tuple[list[Turn], list[Turn]]:
        sides = [replace(prompt, messages=[*prompt.messages, reply]) for reply in (chosen, rejected)]
        chosen_turns, rejected_turns = self.turns_batch(sides)
        return chosen_turns, rejected_turns

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        (turns,) = self.turns_batch([conversation])
        return [token for turn in turns for token in (*turn.source, *turn.target)]

    def pieces(self, conversation: Conversation) -> Iterator[PieceTurn]:
        """Yield (source pieces, target pieces, the reply) for each turn.

        A conversation that ends in a source turn ends in a turn without target, whose reply is None.
        """
        template = self.template
        for index, (sources, reply) in enumerate(_pairs(conversation.messages)):
            source: list[Piece] = []
            if index == 0:
                source += template.prefix.fill()
                system = conversation.system or template.default_system
                if conversation.tools:
                    system += TOOL_FORMATS[template.tool_format].listing(parse_tools(conversation.tools))
                if system:
                    source += template.system.fill(content=system)
            else:
                source += template.separator.fill()
            slot = template.user if sources[0].role == "user" else template.observation
            content = slot.join.join(message.content for message in sources)
            source += slot.fill(content=content, idx=str(index))
            if reply is None:
                empty = "".join(template.thought_words) if template.reasoning and self._thinking is False else ""
                yield [*source, empty] if empty else source, [], None
                return
            thought, target = self._reply(reply, index)
            if thought and self._thinking:
                target = [thought, *target]
            elif thought:
                source.append(thought)
            yield source, target, reply

    def _reply(self, reply: Message, index: int) -> tuple[str, list[Piece]]:
        """The pieces of a reply, and the empty thought that its turn needs ('' when it needs none)."""
        template, (opening, closing) = self.template, self.template.thought_words
        lead, content = "", reply.content
        if reply.reasoning:
            lead = opening + reply.reasoning.strip("\n") + closing
        elif reply.role == "function" and content.startswith(opening):
            lead, content = _split_thought(content, closing)
        lead += reply.preface
        if template.reasoning and self._thinking is False:
            lead, content = self._without_thoughts(lead), self._without_thoughts(content)
        text = lead + content
        empty = opening + closing if template.reasoning and opening not in text and closing not in text else ""
        if reply.role == "assistant":
            return empty, template.assistant.fill(content=text, idx=str(index))
        return empty, self._calls(lead, content)

    def _without_thoughts(self, text: str) -> str:
        opening, closing = map(re.escape, self.template.thought_words)
        return re.sub(f"{opening}.*?{closing}", "", text, flags=re.DOTALL).lstrip("\n")

    def _calls(self, lead: str, content: str) -> list[Piece]:
        calls = parse_calls(content)
        if calls is None:
            # Not a call in JSON: what stands there is kept, as a reply.
            return self.template.assistant.fill(content=lead + content)
        tool_format, slot = TOOL_FORMATS[self.template.tool_format], self.template.function
        if tool_format.call is not None:
            # Text before the calls stands on lines of its own; thought words bring their own line ends.
            gap = "\n" if lead and not lead.endswith("\n") else ""
            return slot.fill(content=lead + gap + tool_format.join.join(tool_format.call(*call) for call in calls))
        pieces: list[Piece] = []
        for position, (name, arguments) in enumerate(calls):
            end = position == len(calls) - 1
            filled = slot.fill(name=name, arguments=arguments)
            pieces += filled if end else [piece for piece in filled if isinstance(piece, str)] + [tool_format.join]
        return ([lead] if lead else []) + pieces

    def _encode_turns(self, conversations: list[list[PieceTurn]]) -> list[list[Turn]]:
        parts = (part for turns in conversations for source, target, _ in turns for part in (source, target))
        texts = list(dict.fromkeys(piece for part in parts for piece in part if isinstance(piece, str)))
        encoded = dict(zip(texts, encode_texts(self._tokenizer, texts), strict=True))

        def ids(pieces: list[Piece]) -> list[int]:
            found: list[int] = []
            for piece in pieces:
                if isinstance(piece, str):
                    found += encoded[piece]
                elif (token_id := self._special_id(piece.name)) is not None:
                    found.append(token_id)
            return found

        return [
            [Turn(ids(source), ids(target), reply is None or reply.loss) for source, target, reply in turns]
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
                "the template of the model, or add the token with model.add_special_tokens"
            )
        return token_id


def piece_text(pieces: list[Piece], *, bos_token: str, eos_token: str) -> str:
    """The text of pieces with special tokens written out."""
    names = {"bos_token": bos_token, "eos_token": eos_token}
    return "".join(names.get(p.name, p.name) if isinstance(p, SpecialToken) else p for p in pieces)


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> Iterable[Sequence[int]]:
    """Ids of each text on its own, without special tokens added; one call for all where the tokenizer can."""
    if hasattr(tokenizer, "encode_batch"):
        return tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _pairs(messages: list[Message]) -> Iterator[tuple[list[Message], Message | None]]:
    sources: list[Message] = []
    for message in messages:
        if message.role in SOURCE_ROLES:
            sources.append(message)
        else:
            assert message.role in TARGET_ROLES and sources, "roles were checked when the record was read"
            yield sources, message
            sources = []
    if sources:
        yield sources, None


def _split_thought(text: str, closing: str) -> tuple[str, str]:
    """Split text that begins with a thought in the thought and the rest; ('', text) when the thought is not closed."""
    end = text.find(closing)
    if end < 0:
        return "", text
    return text[: end + len(closing)], text[end + len(closing) :]
