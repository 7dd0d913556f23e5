"""Clients that leave, servers that are told to end, models that fail: what is freed, and what the others are told."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import openai
import pytest

from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.serve import main as serve_main
from mindspeed_llm.tasks.inference.serve import worker
from mindspeed_llm.tasks.inference.serve.service import Service
from tests.tasks.inference.serve.serving import (
    MODEL,
    SLOTS,
    client_of,
    reciting_lm,
    serving,
    serving_args,
    url_in,
    wait_for,
)

LONG = {"model": MODEL, "prompt": "|", "max_tokens": 400, "temperature": 0}
TEXT = "and so on, " * 60


@pytest.fixture
def lm() -> CausalLM:
    found = reciting_lm(TEXT)
    found.backend.seconds = 0.002
    return found


@pytest.fixture
def service(lm: CausalLM) -> Iterator[Service]:
    with serving(lm, waiting=2) as found:
        yield found


def _post(service: Service, body: dict) -> socket.socket:
    """A connection on which the request has been sent, and nothing been read."""
    host = urlsplit(service.url)
    connection = socket.create_connection((host.hostname, host.port))
    text = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(text)}", "", ""])
    connection.sendall(head.encode() + text)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_slots(service: Service, lm: CausalLM, stream: bool) -> None:
    # All slots, and all places to wait.
    connections = [_post(service, {**LONG, "stream": stream}) for _ in range(SLOTS + 2)]
    wait_for(lambda: service.worker.open == SLOTS + 2 and len(lm.backend.batches) > 5)
    with client_of(service) as client:
        with pytest.raises(openai.InternalServerError, match="too many requests") as refused:
            client.completions.create(**LONG)
        assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"]
        for connection in connections:
            connection.close()
        wait_for(lambda: service.worker.open == 0)
        before = len(lm.backend.batches)
        answer = client.completions.create(**{**LONG, "max_tokens": 10})
    assert answer.choices[0].text == TEXT[:10]
    # Nothing of the others was computed any more: one prompt, and nine tokens after the first.
    assert [len(batch.slots) for batch in lm.backend.batches[before:]].count(1) >= 10
    assert len(lm.backend.batches) - before <= 12


def test_a_stream_that_its_client_closes_frees_its_slot(service: Service) -> None:
    with client_of(service) as client:
        stream = client.completions.create(stream=True, **LONG)
        assert "".join(next(stream).choices[0].text for _ in range(3)) and service.worker.open == 1
        stream.close()
        wait_for(lambda: service.worker.open == 0)


def test_answers_are_finished_when_the_server_is_told_to_end(service: Service, lm: CausalLM) -> None:
    asked = {**LONG, "max_tokens": 100}
    with client_of(service) as client, ThreadPoolExecutor(1) as pool:
        lm.backend.gate.clear()
        running = pool.submit(client.completions.create, **asked)
        wait_for(lambda: service.worker.open == 1)
        service.end()
        lm.backend.gate.set()
        wait_for(lambda: service.worker._closed is not None)
        with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):
            client.completions.create(**asked)
        assert running.result(20).choices[0].text == TEXT[:100]


def test_what_does_not_end_in_time_ends_with_an_error(
    service: Service, lm: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "GRACE_S", 0.2)
    lm.backend.seconds = 0.02
    with client_of(service) as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.completions.create, **LONG)
        stream = client.completions.create(stream=True, **LONG)
        next(stream)
        service.end()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            running.result(20)


def test_all_are_told_when_the_model_fails(lm: CausalLM) -> None:
    with (
        pytest.raises(FloatingPointError),
        serving(lm) as service,
        client_of(service) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        running = [pool.submit(client.completions.create, **LONG) for _ in range(2)]
        stream = client.completions.create(stream=True, **LONG)
        next(stream)
        wait_for(lambda: service.worker.open == 3)
        lm.backend.error = FloatingPointError("of the model")
        for answer in running:
            with pytest.raises(openai.InternalServerError, match="the model failed"):
                answer.result(20)
        with pytest.raises(openai.APIError, match="the model failed"):
            list(stream)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command(
    lm: CausalLM, number: signal.Signals, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINDSPEED_API_KEY", "from-the-environment")
    args = serving_args()
    secret = "|nobody else reads this"
    texts = []

    def be_a_client() -> None:
        try:
            wait_for(lambda: "serving at" in caplog.text)
            client = openai.OpenAI(base_url=url_in(caplog.text), api_key="from-the-environment", max_retries=0)
            found = client.completions.create(model="toy", prompt=secret, max_tokens=5, temperature=0)
            texts.append(found.choices[0].text)
            chat = client.chat.completions.create(model="toy", messages=[{"role": "user", "content": secret}])
            texts.append(chat.choices[0].message.content)
        finally:
            os.kill(os.getpid(), number)

    before = [signal.getsignal(item) for item in (signal.SIGINT, signal.SIGTERM)]
    with caplog.at_level(logging.INFO, "mindspeed_llm"):
        thread = threading.Thread(target=be_a_client)
        thread.start()
        assert serve_main.serve(lm, args) == 128 + number
        thread.join(20)
    assert len(texts) == 2 and texts[0] and texts[0] in TEXT
    assert [signal.getsignal(item) for item in (signal.SIGINT, signal.SIGTERM)] == before
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("POST /v1/completions 200 in ") and "23 + 5 tokens" in line for line in lines)
    assert not any(word in line for line in lines for word in ("nobody", "and so", "from-the-environment"))
