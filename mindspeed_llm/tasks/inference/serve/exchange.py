"""One HTTP request and its response, over ASGI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from mindspeed_llm.tasks.inference.serve.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# What is too large is read and dropped up to so many times the limit: a client that still sends would see a broken
# connection instead of the answer.
_DROPPED = 4


class Disconnected(Exception):
    """The client is gone."""


class Exchange:
    """A request, read in parts, and its response: one JSON object, or a stream of events."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.status: int | None = None
        """Of the response, once it has begun."""
        self._is_answered = False
        self._headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        self._receive, self._send = receive, send

    def header(self, name: str) -> bytes:
        """The value of a header, by its name in lower case; empty where there is none."""
        return self._headers.get(name, b"")

    async def body(self, limit: int, seconds: float) -> bytes:
        """The whole body.

        Raises:
            ApiError: it is larger than `limit` bytes, or does not come within `seconds`.
            Disconnected: the client is gone.
        """
        try:
            return await asyncio.wait_for(self._read(limit), seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body of the request did not come within {seconds:g} seconds") from None

    async def _read(self, limit: int) -> bytes:
        announced = self.header("content-length")
        too_large = announced.isdigit() and int(announced) > limit
        parts: list[bytes] = []
        size, more = 0, True
        while more and size <= limit * _DROPPED:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            part = message.get("body", b"")
            size += len(part)
            more = message.get("more_body", False)
            too_large = too_large or size > limit
            if too_large:
                parts.clear()
            else:
                parts.append(part)
        if too_large:
            raise ApiError(413, f"the body is larger than {limit} bytes; send fewer prompts at once", code="too_large")
        return b"".join(parts)

    async def while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` as long as the client is there; call it when the body has been read.

        Raises:
            Disconnected: the client has gone before the end; `work` has been cancelled.
            Exception: what `work` raised.
        """
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            # The end of the response ends the watch as well.
            if not task.done() and not self._is_answered:
                raise Disconnected
            await task
        finally:
            for pending in (task, watch):
                pending.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue

    async def reply(self, status: int, payload: Any, headers: dict[str, str] | None = None) -> None:
        """Answer with a JSON value."""
        body = json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        await self._start(
            status, {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        )
        await self._write(body, more=False)

    async def event(self, text: str) -> None:
        """One event of a stream, which begins with the first."""
        if self.status is None:
            # Proxies must not collect events before they pass them on.
            headers = {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
            await self._start(200, headers)
        await self._write(f"data: {text}\n\n".encode(), more=True)

    async def end_events(self) -> None:
        """The end of a stream, as OpenAI's clients expect it."""
        await self.event("[DONE]")
        await self._write(b"", more=False)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        await self._guarded(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
            }
        )

    async def _write(self, body: bytes, *, more: bool) -> None:
        self._is_answered = not more
        await self._guarded({"type": "http.response.body", "body": body, "more_body": more})

    async def _guarded(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:
            raise Disconnected from None
