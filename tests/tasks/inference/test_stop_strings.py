"""Text that grows by tokens: whole characters only, and the same in the end as if all tokens were decoded at once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models

from mindspeed_llm.tasks.inference.generation import Request
from mindspeed_llm.tasks.inference.stop_strings import (
    Decode,
    GrowingText,
    certain_length,
    first_stop,
)
from mindspeed_llm.tasks.inference.text_in_work import TextInWork
from tests.support.tokenizers import byte_tokenizer

TEXTS = ["plain words, and more", "naïve café – ½", "日本語 and 🙂👩‍👩‍👧 mixed🤖", " leading", "a\n\nb", "🙂"]


def byte_level() -> tuple[Decode, list[list[int]]]:
    """One token a byte, special tokens between."""
    tokenizer = byte_tokenizer(["<mark>"])
    mark = tokenizer.convert_tokens_to_ids("<mark>")
    texts = [tokenizer.encode(text) for text in TEXTS]
    texts.append([mark, *texts[2][:7], mark, *texts[2][7:], mark, mark, *texts[3]])
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True), texts


def sentencepiece() -> tuple[Decode, list[list[int]]]:
    """As Llama 2: words with their blank in front, which a text's beginning loses; bytes for unknown characters."""
    words = ["<s>", "▁", "▁plain", "▁words", ",", "▁and", "▁more", "s", "▁▁"]
    tokens = {token: number for number, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = Tokenizer(models.BPE(vocab=tokens, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])

    def ids(*parts: str) -> list[int]:
        found = []
        for part in parts:
            found += [tokens[part]] if part in tokens else [tokens[f"<0x{byte:02X}>"] for byte in part.encode()]
        return found

    texts = [
        ids("▁plain", "▁words", ",", "▁and", "▁more"),
        ids("▁plain", "日本", "▁and", "🙂", "s", "▁", "🤖", "▁more"),
        ids("▁", "▁plain", "▁▁", "▁words"),
        ids("▁plain", "<s>", "▁words", "<s>", "<s>", "s", "▁and"),
        ids("🙂", "▁", "s"),
    ]
    return lambda ids: backend.decode(list(ids), skip_special_tokens=True), texts


KINDS = {"byte-level": byte_level, "sentencepiece": sentencepiece}


@pytest.mark.parametrize("kind", KINDS)
def test_growing_text_is_a_beginning_of_the_whole(kind: str) -> None:
    decode, texts = KINDS[kind]()
    for ids in texts:
        growing, whole, seen = GrowingText(decode), decode(ids), []
        for token in ids:
            growing.add(token)
            seen.append(growing.text)
        assert seen[-1] == whole
        assert all(whole.startswith(text) for text in seen)
        # No character waits longer than its bytes: all that the tokens so far have is there.
        for count, text in enumerate(seen, start=1):
            assert len(text) >= len(decode(ids[:count]).rstrip("\ufffd"))


def test_decoding_does_not_grow_with_the_text() -> None:
    lengths = []
    tokenizer = byte_tokenizer()

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return tokenizer.decode(ids)

    growing = GrowingText(decode)
    for token in tokenizer.encode("日本語 " * 40):
        growing.add(token)
    assert growing.text == "日本語 " * 40
    assert max(lengths) <= 8


def test_bytes_that_never_become_a_character_are_shown_once_others_follow() -> None:
    tokenizer = byte_tokenizer()
    ids = [*tokenizer.encode("a"), tokenizer.encode("é")[0], *tokenizer.encode("bc")]
    growing = GrowingText(tokenizer.decode)
    seen = []
    for token in ids:
        growing.add(token)
        seen.append(growing.text)
    assert seen == ["a", "a", "a\ufffdb", "a\ufffdbc"]


@pytest.mark.parametrize(
    ("text", "strings", "place"),
    [
        ("abcabc", ["ca"], 2),
        ("abc", ["bc", "c", "x"], 1),
        ("abc", ["abcd"], None),
        ("abc", [], None),
        ("aab", ["ab"], 1),
    ],
)
def test_first_stop(text: str, strings: list[str], place: int | None) -> None:
    assert first_stop(text, strings) == place
    # What was looked at before is not looked at again, but a string may have begun there.
    for checked in range(0 if place is None else min(len(text), place + 1)):
        assert first_stop(text, strings, checked=checked) == place


@pytest.mark.parametrize(
    ("text", "strings", "length"),
    [
        ("hello", ["lox"], 3),
        ("hello\n", ["\n\n"], 5),
        ("hell", ["e"], 4),
        ("aa", ["aab"], 0),
        ("x", [], 1),
        ("", ["a"], 0),
    ],
)
def test_certain_length(text: str, strings: list[str], length: int) -> None:
    assert certain_length(text, strings) == length


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_before_a_character(kind: str) -> None:
    """The reference: the token is the first whose bytes change the text at that place."""
    decode, texts = KINDS[kind]()
    for ids in texts:
        whole, growing = decode(ids), GrowingText(decode)
        for token in ids:
            growing.add(token)
        for position in range(len(whole)):
            count = growing.tokens_before(position)
            front = decode(ids[:count])
            assert front == whole[: len(front)], "a character is not torn"
            assert len(front) <= position
            # One token more has some of the character.
            assert decode(ids[: count + 1]) not in (whole[:position], whole[: len(front)])


def run(ids: Sequence[int], decode: Decode, strings: Sequence[str]) -> list[TextInWork]:
    """One text after each of its tokens: a new one each time."""
    found = []
    for count in range(1, len(ids) + 1):
        text = TextInWork(
            0,
            Request(prompt=(1,), max_new_tokens=len(ids), stop_strings=tuple(strings)),
            length=1000,
            decode=decode,
            report=True,
        )
        for place, token in enumerate(ids[:count]):
            text.add(token, -float(place))
            if text.finish_reason is not None:
                break
        found.append(text)
        if text.finish_reason is not None:
            break
    return found


@pytest.mark.parametrize("seed", range(6))
def test_answers_end_where_the_string_begins(seed: int) -> None:
    """Against splitting the whole text: strings across tokens, within characters' bytes, several at once."""
    decode, texts = byte_level()
    choose = random.Random(seed)
    ids = texts[seed]
    whole = decode(ids)
    for _ in range(15):
        begin = choose.randrange(len(whole))
        strings = [whole[begin : begin + choose.randint(1, 4)], "no such text"]
        states = run(ids, decode, strings)
        last = states[-1].completion()
        expected = whole.split(strings[0])[0]
        assert (last.text, last.finish_reason) == (expected, "stop")
        assert decode(last.token_ids) == expected
        assert last.token_ids == tuple(ids[: len(last.token_ids)])
        assert last.logprobs == tuple(-float(place) for place in range(len(last.token_ids)))
        shown = [state.completion().text for state in states]
        assert all(expected.startswith(text) for text in shown), "what has been shown is never taken back"
        assert all(state.completion().finish_reason is None for state in states[:-1])


def test_what_only_began_like_a_stop_string_is_shown_in_the_end() -> None:
    tokenizer = byte_tokenizer()
    states = run(tokenizer.encode("hello##"), tokenizer.decode, ["###"])
    assert [state.completion().text for state in states] == ["h", "he", "hel", "hell", "hello", "hello", "hello##"]
    assert states[-1].finish_reason == "length"


def test_a_character_that_is_cut_by_the_limit_is_shown_as_decoded() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("aé")[:2]
    states = run(ids, tokenizer.decode, [])
    assert [state.completion().text for state in states] == ["a", "a\ufffd"]
    assert states[-1].completion().token_ids == tuple(ids)
