"""The server's answers to HTTP requests: who may ask, what there is, and how mistakes are told."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mindspeed_llm.errors import UserError
from mindspeed_llm.tasks.inference.serve.check import KEY_VARIABLE, Address
from mindspeed_llm.tasks.inference.serve.endpoints import Endpoints
from mindspeed_llm.tasks.inference.serve.errors import ApiError
from mindspeed_llm.tasks.inference.serve.exchange import Disconnected, Exchange, Receive, Scope, Send
from mindspeed_llm.tasks.inference.serve.fields import Fields, parse_object
from mindspeed_llm.tasks.inference.serve.formats import Usage
from mindspeed_llm.tasks.inference.serve.worker import Worker

_LOG = logging.getLogger("mindspeed_llm")

BODY_LIMIT = 16 * 2**20
"""Bytes of a request's body."""
_BODY_SECONDS = 60.0
_RETRY_SECONDS = "1"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

_Handler = Callable[[Exchange], Awaitable[Usage | None]]


class App:
    """An ASGI application."""

    def __init__(self, endpoints: Endpoints, worker: Worker, address: Address) -> None:
        self._endpoints, self._worker = endpoints, worker
        self._key = None if address.api_key is None else _digest(address.api_key.encode())
        # A web page can have a name of its own stand for this machine, and ask in its visitor's browser.
        self._hosts = None if address.api_key is not None else {*_LOOPBACK_NAMES, address.host.lower()}
        self._created = int(time.time())
        self._routes: dict[str, dict[str, _Handler]] = {
            "/health": {"GET": self._health},
            "/v1/models": {"GET": self._models},
            f"/v1/models/{endpoints.model}": {"GET": self._model},
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat_completions},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"a request of kind {scope['type']!r}, which this server has not")
        exchange = Exchange(scope, receive, send)
        begin, usage, note = time.monotonic(), None, ""
        try:
            usage = await self._handled(exchange)
        except Disconnected:
            note = ", the client has gone"
        # Prompts and answers are nobody's business but the client's: they are never logged.
        _LOG.info(
            "%s %s %s in %.3f s%s%s",
            exchange.method,
            exchange.path if exchange.path in self._routes else "(unknown path)",
            exchange.status or "-",
            time.monotonic() - begin,
            f", {usage.prompt_tokens} + {usage.completion_tokens} tokens" if usage else "",
            note,
        )

    async def _handled(self, exchange: Exchange) -> Usage | None:
        try:
            handler = self._admitted(exchange)
            return await handler(exchange)
        except ApiError as error:
            await _tell(exchange, error)
        except UserError as error:
            await _tell(exchange, ApiError(400, str(error), code="invalid_value"))
        except Disconnected:
            raise
        except Exception as error:
            # Texts of errors may have prompts in them.
            where = traceback.extract_tb(error.__traceback__)[-1]
            _LOG.error("a request failed: %s (%s:%s)", type(error).__name__, where.filename, where.lineno)
            if os.environ.get("MINDSPEED_DEBUG") == "1":
                _LOG.error("%s", traceback.format_exc())
            await _tell(exchange, ApiError(500, "the request failed; see the server's log", code=type(error).__name__))
        return None

    def _admitted(self, exchange: Exchange) -> _Handler:
        """What answers the request. Raises ApiError where nothing does, or where the client may not ask."""
        if self._hosts is not None:
            name = exchange.header("host").decode("latin-1").lower()
            host = name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name
            if host not in self._hosts:
                raise ApiError(
                    403, "this server answers to its own address only; with an API key it answers to any", code="host"
                )
        if exchange.path != "/health":
            self._check_key(exchange)
        methods = self._routes.get(exchange.path)
        if methods is None and exchange.path.startswith("/v1/models/"):
            raise _unknown_model(exchange.path.removeprefix("/v1/models/"), self._endpoints.model)
        if methods is None:
            known = ", ".join(sorted(path for path in self._routes if not path.startswith("/v1/models/")))
            raise ApiError(404, f"there is no such path; this server has {known}", code="not_found")
        if exchange.method not in methods:
            raise ApiError(405, f"{exchange.path} is asked with {', '.join(methods)}", code="method_not_allowed")
        return methods[exchange.method]

    def _check_key(self, exchange: Exchange) -> None:
        if self._key is None:
            return
        scheme, _, key = exchange.header("authorization").partition(b" ")
        if scheme.lower() != b"bearer":
            raise ApiError(401, "no API key; send the header 'Authorization: Bearer KEY'", code="invalid_api_key")
        # Of the same length whatever the client sends, and compared in the same time wherever they differ.
        if not hmac.compare_digest(_digest(key.strip()), self._key):
            raise ApiError(
                401, f"wrong API key; the server has its own from {KEY_VARIABLE} or --api-key", code="invalid_api_key"
            )

    async def _health(self, exchange: Exchange) -> None:
        await exchange.reply(200, {"status": "ok"})

    async def _models(self, exchange: Exchange) -> None:
        await exchange.reply(200, {"object": "list", "data": [self._model_object()]})

    async def _model(self, exchange: Exchange) -> None:
        await exchange.reply(200, self._model_object())

    def _model_object(self) -> dict[str, Any]:
        return {
            "id": self._endpoints.model,
            "object": "model",
            "created": self._created,
            "owned_by": "mindspeed_llm",
            "max_model_len": self._endpoints.length,
        }

    async def _completions(self, exchange: Exchange) -> Usage:
        return await self._generated(exchange, self._endpoints.completions)

    async def _chat_completions(self, exchange: Exchange) -> Usage:
        return await self._generated(exchange, self._endpoints.chat_completions)

    async def _generated(self, exchange: Exchange, endpoint: Callable[[Exchange, Fields], Awaitable[Usage]]) -> Usage:
        # Web pages of other sites can send any other kind without asking first.
        if exchange.header("content-type").partition(b";")[0].strip().lower() != b"application/json":
            raise ApiError(415, "expected the header 'Content-Type: application/json'", code="unsupported_media_type")
        fields = Fields(parse_object(await exchange.body(BODY_LIMIT, _BODY_SECONDS)))
        model = fields.text("model")
        if model is not None and model != self._endpoints.model:
            raise _unknown_model(model, self._endpoints.model)
        found: list[Usage] = []

        async def work() -> None:
            found.append(await endpoint(exchange, fields))

        await exchange.while_connected(work())
        return found[0]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _unknown_model(name: str, known: str) -> ApiError:
    shown = Path(name).name[:80]
    return ApiError(
        404, f"model: {shown!r} is not served here; expected {known!r}", param="model", code="model_not_found"
    )


async def _tell(exchange: Exchange, error: ApiError) -> None:
    """Tell the client of an error: as the response, or within the stream that has begun."""
    if exchange.status is not None:
        await exchange.event(json.dumps(error.body()))
        await exchange.end_events()
        return
    headers = {}
    if error.status == 503:
        headers["retry-after"] = _RETRY_SECONDS
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    await exchange.reply(error.status, error.body(), headers)
