"""What every layout does: a conversation becomes turns of text pieces and special tokens, without a tokenizer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mindspeed_llm.tasks.preprocess.records import SOURCE_ROLES, TARGET_ROLES, Conversation, Message
from mindspeed_llm.tasks.preprocess.templates import Piece

PieceTurn = tuple[list[Piece], list[Piece], Message | None]
"""(source, target, the reply); the reply is None in the last turn of a conversation that ends in a source turn."""


@dataclass(frozen=True, kw_only=True)
class RenderOptions:
    """What the user chooses about thoughts.

    `enable_thinking` (reasoning templates only): True trains on thoughts, empty ones included; False removes thoughts,
    with empty ones in the prompt; None keeps thoughts, with empty ones in the prompt. `drop_thinking` False keeps the
    thoughts of earlier turns where the format leaves them out. `reasoning_effort` is one that the template names.
    """

    enable_thinking: bool | None = None
    drop_thinking: bool = True
    reasoning_effort: str | None = None


class Layout(Protocol):
    """One way to write conversations; made from a template and `RenderOptions`."""

    def pieces(
        self, conversation: Conversation, *, one_turn: bool = False, empty_in_target: bool = False
    ) -> Iterator[PieceTurn]:
        """Yield the turns of the conversation.

        `one_turn`: only the last reply counts (a preference pair, a prompt). `empty_in_target`: empty thoughts belong
        to the replies, whatever `enable_thinking` says. Raises UserError where the layout cannot express the
        conversation.
        """
        ...


def split_turns(messages: Sequence[Message]) -> list[tuple[list[Message], Message | None]]:
    """Messages as (source messages, the reply to them); None in place of the reply that a prompt lacks."""
    turns: list[tuple[list[Message], Message | None]] = []
    sources: list[Message] = []
    for message in messages:
        if message.role in SOURCE_ROLES:
            sources.append(message)
        else:
            assert message.role in TARGET_ROLES and sources, "roles were checked when the record was read"
            turns.append((sources, message))
            sources = []
    if sources:
        turns.append((sources, None))
    return turns


def has_question(sources: Sequence[Message]) -> bool:
    """Whether a user asks here: results of tools that a record gives as user text in their tags are no question."""
    return any(
        message.role == "user"
        and not (message.content.startswith("<tool_response>") and message.content.endswith("</tool_response>"))
        for message in sources
    )


def piece_text(pieces: Sequence[Piece], *, bos_token: str, eos_token: str) -> str:
    """The text of pieces with special tokens written out."""
    names = {"bos_token": bos_token, "eos_token": eos_token}
    return "".join(piece if isinstance(piece, str) else names.get(piece.name, piece.name) for piece in pieces)
