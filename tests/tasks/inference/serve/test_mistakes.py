"""Requests that cannot be answered: the status, and the field that is named."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from mindspeed_llm.tasks.inference.serve import app
from mindspeed_llm.tasks.inference.serve.service import Service
from tests.tasks.inference.serve.serving import MODEL, client_of, reciting_lm, serving

KEY = "k-0123456789"
LENGTH = 120


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serving(reciting_lm("yes"), length=LENGTH, api_key=KEY) as found:
        yield found


def ask(
    service: Service, path: str, body: bytes | None, *, method: str = "POST", **headers: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, JSON, headers) of a request; headers replace those that are right."""
    connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=20)
    right = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    given = {name.replace("_", "-").title(): value for name, value in headers.items()}
    connection.request(method, path, body=body, headers={k: v for k, v in {**right, **given}.items() if v})
    response = connection.getresponse()
    payload = json.loads(response.read())
    connection.close()
    return response.status, payload, dict(response.getheaders())


COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "|", "temperature": 0, "max_tokens": 5}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "|"}], "temperature": 0, "max_tokens": 1}

BODIES: list[tuple[bytes, str]] = [
    (b"", "JSON"),
    (b"{", "JSON"),
    (b'{"prompt": "a",}', "JSON"),
    (b'{"prompt": "\xff"}', "UTF-8"),
    (b'{"temperature": NaN}', "NaN"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "JSON"),
    (b"[" * 100_000, "deeply"),
    (b'["prompt"]', "object"),
    (b"null", "object"),
]

COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "null"),
    ({"prompt": 5}, "prompt", "5"),
    ({"prompt": []}, "prompt", "found an empty list"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": ["a", 1]}, "prompt", "list"),
    ({"prompt": [True]}, "prompt", "list"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": [1, 10**9]}, "prompt", "1000000000"),
    ({"prompt": "\ud83d"}, "prompt", "surrogate"),
    ({"prompt": ["|"] * 2000}, "prompt", "2000"),
    ({"prompt": "a" * 116}, "prompt", "maximum context length is 120 tokens. The request has 116 tokens"),
    ({"max_tokens": 0}, "max_tokens", "1"),
    ({"max_tokens": "5"}, "max_tokens", "whole number"),
    ({"max_tokens": 2.5}, "max_tokens", "2.5"),
    ({"max_tokens": True}, "max_tokens", "true"),
    ({"max_tokens": 10**80}, "max_tokens", "many digits"),
    ({"temperature": -0.1}, "temperature", "-0.1"),
    ({"temperature": 3}, "temperature", "3"),
    ({"temperature": 1e-38}, "temperature", "1e-38; expected a number from 1e-05 to 2, or 0"),
    ({"temperature": "hot"}, "temperature", "hot"),
    ({"temperature": 1e999}, "temperature", "JSON"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"n": 0}, "n", "0"),
    ({"n": 1000}, "n", "1000"),
    ({"n": 100}, "n", "100 answers"),
    ({"stop": 1}, "stop", "1"),
    ({"stop": ["a", 1]}, "stop", "1"),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": ["a"] * 65}, "stop", "65"),
    ({"seed": 2**63}, "seed", "expected"),
    ({"logprobs": 21}, "logprobs", "21"),
    ({"logprobs": True}, "logprobs", "whole number"),
    ({"stream": 1}, "stream", "1"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream": True, "stream_options": {"include_usages": True}}, "include_usages", "include_usage"),
    ({"presence_penalty": 0.5}, "presence_penalty", "repetition_penalty"),
    ({"frequency_penalty": -1}, "frequency_penalty", "not supported"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    ({"best_of": 2}, "best_of", "n (1)"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"temprature": 1}, "temprature", "'temperature'"),
    ({"messages": []}, "messages", "unknown field"),
]

CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "null"),
    ({"messages": []}, "messages", "found an empty list"),
    ({"messages": ["hello"]}, "messages[0]", "hello"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "null"),
    ({"messages": [{"role": "tool", "content": "5"}]}, "messages[0].role", "tool"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "None"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "text only"),
    ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages[0].content", "surrogate"),
    ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, "weight", "unknown"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "messages", "out of order"),
    ({"messages": CHAT["messages"] + [{"role": "system", "content": "a"}]}, "messages[1].role", "first"),
    ({"messages": [*CHAT["messages"], {"role": "assistant", "content": "a"}]}, "messages", "question"),
    ({"messages": [{"role": "user", "content": "a" * 120}]}, "messages", "maximum context length"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"modalities": ["audio"]}, "modalities", "not supported"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"logprobs": 1}, "logprobs", "true or false"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "0"),
    ({"prompt": "a"}, "prompt", "unknown field"),
]

HARMLESS: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": False,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "seed": None,
    "stop": None,
    "n": 1,
}


def test_bodies_that_are_no_request(service: Service) -> None:
    for body, word in BODIES:
        status, payload, _ = ask(service, "/v1/completions", body)
        assert status == 400 and word in payload["error"]["message"], body[:40]
        assert payload["error"]["type"] == "invalid_request_error"


def test_fields_that_cannot_be(service: Service) -> None:
    rows = [("/v1/completions", COMPLETION, *row) for row in COMPLETIONS]
    rows += [("/v1/chat/completions", CHAT, *row) for row in CHATS]
    for path, right, change, field, word in rows:
        status, payload, _ = ask(service, path, json.dumps({**right, **change}).encode())
        error = payload.get("error", {})
        assert status == 400, (change, payload)
        assert word in error["message"], (change, error)
        # Python's JSON writes infinity as none can read it.
        assert word == "JSON" or error["param"] == field, (change, error)


def test_what_changes_nothing_is_taken(service: Service) -> None:
    chat = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "parallel_tool_calls": True}
    # As lm-eval and OpenAI's client write messages.
    system = {"role": "developer", "content": [{"type": "text", "text": ""}]}
    question = {"role": "user", "content": "a", "type": "text", "name": "me"}
    reply = {"role": "assistant", "content": "b", "refusal": None, "annotations": [], "tool_calls": None}
    for path, right, change in (
        ("/v1/completions", COMPLETION, HARMLESS),
        ("/v1/completions", COMPLETION, {"best_of": 1, "suffix": "", "model": None}),
        ("/v1/chat/completions", CHAT, {**HARMLESS, **chat}),
        ("/v1/chat/completions", CHAT, {"messages": [system, question, reply, *CHAT["messages"]], "max_tokens": None}),
    ):
        status, payload, _ = ask(service, path, json.dumps({**right, **change}).encode())
        assert status == 200, payload
        assert payload["usage"]["completion_tokens"] > 0


def test_paths_methods_and_models(service: Service) -> None:
    body = json.dumps(COMPLETION).encode()
    assert ask(service, "/v1/completion", body)[0] == 404
    assert ask(service, "/docs", None, method="GET")[0] == 404
    assert ask(service, "/v1/completions", None, method="GET")[0] == 405
    assert ask(service, "/v1/models", body)[0] == 405
    status, payload, _ = ask(service, "/v1/models/gpt", None, method="GET")
    assert status == 404 and payload["error"]["code"] == "model_not_found"
    with client_of(service, api_key=KEY) as client, pytest.raises(openai.NotFoundError, match="'gpt-4' is not served"):
        client.completions.create(model="gpt-4", prompt="|")


def test_only_who_has_the_key_may_ask(service: Service) -> None:
    body = json.dumps(COMPLETION).encode()
    for header in ("", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer \xe9"):
        status, payload, headers = ask(service, "/v1/completions", body, authorization=header)
        assert (status, payload["error"]["code"]) == (401, "invalid_api_key"), header
        assert headers["www-authenticate"] == "Bearer" and KEY not in json.dumps(payload)
        # Nothing is told of what there is.
        assert ask(service, "/v1/nothing", body, authorization=header)[0] == 401
    assert ask(service, "/v1/completions", body, authorization=f"bearer {KEY}")[0] == 200
    assert ask(service, "/health", None, method="GET", authorization="")[:2] == (200, {"status": "ok"})
    with client_of(service, api_key="other") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_bodies_have_a_limit(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_LIMIT", 1000)
    inside = json.dumps(COMPLETION).encode().ljust(1000)
    assert ask(service, "/v1/completions", inside)[0] == 200
    assert ask(service, "/v1/completions", inside + b" ")[0] == 413
    assert ask(service, "/v1/completions", inside * 3)[0] == 413
    # Without a length: in chunks.
    assert ask(service, "/v1/completions", iter([inside, b" "]))[0] == 413  # type: ignore[arg-type]


def test_pages_of_other_sites_cannot_ask(service: Service) -> None:
    body = json.dumps(COMPLETION).encode()
    for kind in ("", "text/plain", "application/x-www-form-urlencoded"):
        assert ask(service, "/v1/completions", body, content_type=kind)[0] == 415
    assert ask(service, "/v1/completions", body, content_type="Application/JSON; charset=utf-8")[0] == 200
    _, _, headers = ask(service, "/v1/completions", body, origin="http://evil.example")
    assert not [name for name in headers if name.lower().startswith("access-control")]
    # With a key names do not matter; without one a name that leads here may be anybody's.
    assert ask(service, "/v1/models", None, method="GET", host="evil.example")[0] == 200


def test_without_a_key_the_server_has_one_name() -> None:
    with serving(reciting_lm("yes"), with_chat=False) as service:
        port = urlsplit(service.url).port
        for host, status in {
            "127.0.0.1": 200,
            f"localhost:{port}": 200,
            "[::1]:8000": 200,
            "evil.example": 403,
            f"evil.example:{port}": 403,
            "localhost.evil.example": 403,
        }.items():
            assert ask(service, "/v1/models", None, method="GET", host=host, authorization="")[0] == status, host
        status, payload, _ = ask(service, "/v1/chat/completions", json.dumps(CHAT).encode())
        assert status == 400 and "--prompt-type" in payload["error"]["message"]
