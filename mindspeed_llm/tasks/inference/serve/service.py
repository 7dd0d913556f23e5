"""A model that clients can reach: HTTP in a thread of its own, the model in the thread that calls `run`."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.prompt_format import PromptFormat
from mindspeed_llm.tasks.inference.serve.app import App
from mindspeed_llm.tasks.inference.serve.check import Address, listen, url_of
from mindspeed_llm.tasks.inference.serve.endpoints import Endpoints
from mindspeed_llm.tasks.inference.serve.ranks import Ranks
from mindspeed_llm.tasks.inference.serve.ticks import Runner
from mindspeed_llm.tasks.inference.serve.worker import Worker

WAITING = 256
"""Answers that may wait for a slot."""
_BACKLOG = 128
_CLOSING_S = 5
"""Seconds that connections have to close in the end."""


class Service:
    """Listens from its making on, and answers from the beginning of `run`."""

    def __init__(
        self,
        lm: CausalLM,
        runner: Runner,
        ranks: Ranks,
        *,
        address: Address,
        template: PromptFormat | None,
        model: str,
        length: int,
        waiting: int = WAITING,
    ) -> None:
        """Takes the address.

        Args:
            template: how conversations become prompts; None where there is no way.
            model: what clients call the model.
            length: tokens of a prompt and its answer together, at most.
            waiting: answers that may wait for a slot.

        Raises:
            UserError: the address cannot be listened on.
        """
        self._bound = listen(address)
        # Clients that come before `run` wait.
        self._bound.listen(_BACKLOG)
        self.url = url_of(self._bound)
        """The base address that OpenAI's clients are given."""
        self.worker = Worker(runner, ranks, most=lm.batch_size + waiting)
        self._endpoints = Endpoints(lm, self.worker, template, model=model, length=length)
        self._app = App(self._endpoints, self.worker, address)

    def run(self) -> None:
        """Answer clients until `end` is called.

        Raises:
            Exception: whatever the model raised, or the server; clients that waited have been told.
        """
        server = _Server(self._app, on_failure=lambda: self.end(at_once=True))
        try:
            loop = server.start(self._bound)
            try:
                self.worker.run(loop)
            finally:
                server.stop()
        finally:
            self._endpoints.close()
            self._bound.close()
        if server.error is not None:
            raise server.error

    def end(self, *, at_once: bool = False) -> None:
        """Let `run` return when what clients wait for is done, after a few seconds at the latest; `at_once`: now. From
        any thread, and from signal handlers.
        """
        self.worker.end(at_once=at_once)


class _Server:
    """uvicorn in a thread of its own."""

    def __init__(self, app: App, *, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called in that thread where the server fails."""
        import uvicorn

        self.error: Exception | None = None
        """What ended the thread before its time."""
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_CLOSING_S,
            )
        )
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None

    def start(self, bound: socket.socket) -> asyncio.AbstractEventLoop:
        """Begin to listen; the loop that the server runs in."""
        loops: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()

        async def serve() -> None:
            loops.put(asyncio.get_running_loop())
            await self._server.serve(sockets=[bound])

        self._thread = threading.Thread(target=self._run, args=(serve,), name="http", daemon=True)
        self._thread.start()
        return loops.get()

    def stop(self) -> None:
        """Stop listening, and wait until the connections are closed."""
        assert self._thread is not None
        self._server.should_exit = True
        self._thread.join(2 * _CLOSING_S)

    def _run(self, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            asyncio.run(serve())
        except Exception as error:
            self.error = error
            self._on_failure()
