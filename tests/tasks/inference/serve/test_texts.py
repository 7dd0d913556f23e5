"""What clients read while an answer grows: characters of several tokens, strings that end it, tokens by their texts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import openai
import pytest

from tests.tasks.inference.serve.serving import MODEL, client_of, reciting_lm, serving

TEXT = "Grüße, 世界 🙂!\nQuestion: und nun?"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serving(reciting_lm(TEXT)) as service, client_of(service) as found:
        yield found


def test_characters_of_several_tokens_come_whole(client: openai.OpenAI) -> None:
    parts = [
        chunk.choices[0]
        for chunk in client.completions.create(model=MODEL, prompt="|", max_tokens=99, temperature=0, stream=True)
    ]
    texts = [part.text for part in parts if part.text]
    assert "".join(texts) == TEXT and "\ufffd" not in "".join(texts)
    assert len(texts) > 5 and parts[-1].finish_reason == "stop"
    cut = client.completions.create(model=MODEL, prompt="|", max_tokens=3, temperature=0)
    assert cut.choices[0].text.rstrip("\ufffd") == "Gr" and cut.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("\nQuestion:", "Grüße, 世界 🙂!"),
        (["🙂", "nothing"], "Grüße, 世界 "),
        (["界 🙂", "Grüße!"], "Grüße, 世"),
        ("Grüße", ""),
        ("not there", TEXT),
    ],
)
def test_strings_end_answers_and_are_never_seen(
    client: openai.OpenAI, stop: str | list[str], expected: str, stream: bool
) -> None:
    asked = {"model": MODEL, "prompt": "|", "max_tokens": 99, "temperature": 0, "stop": stop}
    if stream:
        parts = [chunk.choices[0] for chunk in client.completions.create(stream=True, logprobs=0, **asked)]
        tokens = list(chain(*(part.logprobs.tokens for part in parts)))
    else:
        parts = client.completions.create(logprobs=0, **asked).choices
        tokens = parts[0].logprobs.tokens
    assert "".join(part.text for part in parts) == expected
    assert parts[-1].finish_reason == "stop"
    assert len(tokens) == len(expected.encode())
    assert "".join(token for token in tokens if "\ufffd" not in token) == "".join(c for c in expected if c.isascii())


def test_tokens_are_told_by_text_bytes_and_place(client: openai.OpenAI) -> None:
    found = client.completions.create(model=MODEL, prompt="ab|", max_tokens=4, temperature=0, logprobs=1, echo=True)
    logprobs = found.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "|", "G", "r", "\ufffd", "\ufffd"]
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5, 5]
    assert found.choices[0].text == "ab|Grü"
    messages = [{"role": "user", "content": "x"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, temperature=0, logprobs=True)
    [token] = chat.choices[0].logprobs.content
    assert (token.token, token.bytes, token.top_logprobs) == ("G", [ord("G")], [])


def test_the_token_that_ends_a_text_is_named_where_one_is_counted_on(client: openai.OpenAI) -> None:
    found = client.completions.create(
        model=MODEL, prompt="|" + TEXT, max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    [choice] = found.choices
    assert choice.text == "|" + TEXT and choice.finish_reason == "stop"
    assert choice.logprobs.tokens[-1] == "<|im_end|>" and len(choice.logprobs.tokens) == len(TEXT.encode()) + 2
