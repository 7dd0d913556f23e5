"""A context and what may follow it, as tokens: where the one ends and the other begins.

The rules are those of lm-eval (`TemplateLM._encode_pair` and its callers), so that numbers compare with published ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.preprocess.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Tokens of a context and of its continuation, at least one of each."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a model computes for a pair: the logits after each of the last `len(targets)` inputs say how likely the
    target at the same place is.
    """

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    """At most as many as there are inputs."""


def prefix_token_id(tokenizer: Tokenizer) -> int:
    """The token that stands before a text without context: the begin token, else the end token.

    Raises:
        UserError: the tokenizer has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise UserError(
        "The tokenizer has neither a bos_token nor an eos_token, one of which has to stand before a text without "
        "context. Name one in tokenizer_config.json."
    )


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, list[int]]:
    """The ids of each text, with the special tokens that the tokenizer puts around texts, except where the text begins
    with the begin token already written out: it is not doubled.
    """
    written_out = _prefix_text(tokenizer)
    groups: tuple[list[str], list[str]] = ([], [])
    for text in dict.fromkeys(texts):
        groups[bool(written_out) and text.startswith(written_out)].append(text)
    found: dict[str, list[int]] = {}
    for begins_itself, group in enumerate(groups):
        found.update(zip(group, tokenizer.encode_batch(group, add_special_tokens=not begins_itself), strict=True))
    return found


def _prefix_text(tokenizer: Tokenizer) -> str:
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        return ""
    return tokenizer.decode([prefix_token_id(tokenizer)])


def encode_pairs(tokenizer: Tokenizer, contexts: Sequence[str], continuations: Sequence[str]) -> list[Pair]:
    """The tokens of each context and its continuation.

    White space at the end of a context counts as the beginning of the continuation, where most tokenizers put it. The
    context is encoded, and the whole text; the continuation is what the whole has behind as many tokens as the context.
    Where a token of the whole would reach over the border, the context keeps its own token and the continuation loses
    that part. A text without context stands behind `prefix_token_id`.

    Raises:
        UserError: a continuation has no token of its own.
    """
    borders = [len(context.rstrip()) for context in contexts]
    fronts = [context[:border] for context, border in zip(contexts, borders, strict=True)]
    wholes = [context + continuation for context, continuation in zip(contexts, continuations, strict=True)]
    encoded = encode_texts(
        tokenizer, [text for pair in zip(contexts, fronts, wholes, strict=True) if pair[0] for text in pair[1:]]
    )
    alone = list(dict.fromkeys(whole for context, whole in zip(contexts, wholes, strict=True) if not context))
    encoded_alone = dict(zip(alone, tokenizer.encode_batch(alone, add_special_tokens=False), strict=True))
    pairs = []
    for context, front, whole, continuation in zip(contexts, fronts, wholes, continuations, strict=True):
        if context:
            before = encoded[front]
            behind = encoded[whole][len(before) :]
        else:
            before, behind = [], encoded_alone[whole]
        if not before and behind:
            prefix = prefix_token_id(tokenizer)
            # A continuation that begins with the token itself has it as its context.
            before, behind = ([prefix], behind) if behind[0] != prefix else (behind[:1], behind[1:])
        if not behind:
            raise UserError(
                f"The continuation {continuation!r} of a context that ends in {context[-40:]!r} adds no token to it. "
                "Its likelihood is not defined: give a continuation that the tokenizer parts from its context."
            )
        pairs.append(Pair(context=tuple(before), continuation=tuple(behind)))
    return pairs


def to_row(pair: Pair, max_length: int) -> Row:
    """The inputs that fit a model of `max_length` positions: the beginning of a long context is left out.

    Raises:
        UserError: the continuation alone has more tokens than the model has positions.
    """
    if len(pair.continuation) > max_length:
        raise UserError(
            f"A continuation has {len(pair.continuation)} tokens, the model has {max_length} positions. "
            "Shorten the continuation or load a model with more positions."
        )
    tokens = (pair.context + pair.continuation)[-(max_length + 1) :]
    return Row(inputs=tokens[:-1], targets=pair.continuation)
