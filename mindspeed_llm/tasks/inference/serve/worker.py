"""Between the clients and the model: the thread that owns the model, and what the thread of the server hands it.

    server's thread                          model's thread
    submit(works) -> a command      ----->   tick: additions, cancellations
    answers' `latest`, `changed`    <-----   results, through the server's event loop

Commands go through a queue whose `put` may be called from signal handlers too. Answers hold only the latest state of
what has been generated, so that a slow client costs no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mindspeed_llm.tasks.inference.generation import Completion
from mindspeed_llm.tasks.inference.serve.errors import OVERLOADED, SHUTTING_DOWN, ApiError
from mindspeed_llm.tasks.inference.serve.ranks import Ranks
from mindspeed_llm.tasks.inference.serve.scoring import Scored
from mindspeed_llm.tasks.inference.serve.ticks import Result, Runner, Tick, Work

# Other ranks wait for the next tick, and would take a long silence for the end of this one.
_SILENCE_S = 10.0
GRACE_S = 5.0
"""Seconds that answers have to come to an end when the server is told to."""


@dataclass(eq=False)
class Answer:
    """One piece of work and what there is of its result; for the server's thread alone, but for key and work."""

    key: int
    work: Work
    changed: asyncio.Event
    """Set at each news; several answers of one client share it."""
    latest: Completion | Scored | None = None
    is_finished: bool = False
    error: ApiError | None = None

    def check(self) -> None:
        """Raise the error that ended the work, if one did."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class _Add:
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class _Cancel:
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class _End:
    at_once: bool = False


_Command = _Add | _Cancel | _End


@dataclass
class _Changes:
    """What the commands of one tick come to."""

    added: list[Answer] = field(default_factory=list)
    cancelled: list[Answer] = field(default_factory=list)


class Worker:
    """Runs the model for the clients of a server."""

    def __init__(self, runner: Runner, ranks: Ranks, *, most: int) -> None:
        """`most`: answers that may be in work or waiting at once."""
        self.most = most
        self._runner, self._ranks = runner, ranks
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._keys = itertools.count()
        # The server's thread alone reads and writes these.
        self._open: dict[int, Answer] = {}
        self._closed: ApiError | None = None
        # The model's thread alone does these.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadline: float | None = None

    # In the server's thread.

    def submit(self, works: Sequence[Work], changed: asyncio.Event) -> list[Answer]:
        """Hand over work; what comes of it is told through the answers.

        Raises:
            ApiError: there is too much work already, or the server ends.
        """
        if self._closed is not None:
            raise self._closed
        if len(works) > self.most:
            raise ApiError(400, f"the request asks for {len(works)} answers; expected at most {self.most}", param="n")
        if len(self._open) + len(works) > self.most:
            raise ApiError(503, "too many requests are waiting; try again later", code=OVERLOADED)
        answers = [Answer(next(self._keys), work, changed) for work in works]
        self._open.update({answer.key: answer for answer in answers})
        self._commands.put(_Add(tuple(answers)))
        return answers

    def abandon(self, answers: Sequence[Answer]) -> None:
        """Nobody waits for these any more; what is finished stays as it is."""
        unfinished = tuple(answer for answer in answers if self._open.pop(answer.key, None) is not None)
        if unfinished:
            self._commands.put(_Cancel(unfinished))

    @property
    def open(self) -> int:
        """Answers in work or waiting."""
        return len(self._open)

    def _publish(self, news: Sequence[tuple[Answer, Completion | Scored, bool]]) -> None:
        for answer, latest, is_finished in news:
            answer.latest, answer.is_finished = latest, is_finished
            answer.changed.set()
            if is_finished:
                self._open.pop(answer.key, None)

    def _close(self, error: ApiError, *, with_open: bool) -> None:
        """Take no more work; with `with_open` what is open ends with the error."""
        self._closed = error
        if with_open:
            for answer in self._open.values():
                answer.error, answer.is_finished = error, True
                answer.changed.set()
            self._open.clear()

    # From any thread, and from signal handlers.

    def end(self, *, at_once: bool = False) -> None:
        """Take no more work, and leave `run` when what there is has ended, at the latest after `GRACE_S` seconds."""
        self._commands.put(_End(at_once))

    # In the model's thread.

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Work until `end`. All answers that are then open end with an error, also where this raises.

        Args:
            loop: the server's event loop.

        Raises:
            Exception: whatever the model raised.
        """
        self._loop = loop
        in_work: dict[int, Answer] = {}
        try:
            while not self._is_over(in_work):
                changes = self._next_changes(in_work)
                tick = Tick(
                    additions=tuple((answer.key, answer.work) for answer in changes.added),
                    cancellations=tuple(answer.key for answer in changes.cancelled),
                )
                self._ranks.send(tick)
                in_work.update({answer.key: answer for answer in changes.added})
                for answer in changes.cancelled:
                    in_work.pop(answer.key, None)
                self._tell(in_work, self._runner.run(tick))
        except BaseException as error:
            self._tell_end(ApiError(500, "the model failed; see the server's log", code=type(error).__name__))
            raise
        self._tell_end(_shutting_down())
        last = Tick(is_last=True, cancellations=tuple(in_work))
        self._ranks.send(last)
        self._runner.run(last)

    def _is_over(self, in_work: dict[int, Answer]) -> bool:
        return self._deadline is not None and (not in_work or time.monotonic() >= self._deadline)

    def _next_changes(self, in_work: dict[int, Answer]) -> _Changes:
        """What the commands say that have come; waits for one where there is nothing to do."""
        changes = _Changes()
        command = self._next_command(wait=not self._runner.busy)
        while command is not None:
            if isinstance(command, _Add):
                changes.added += command.answers
            elif isinstance(command, _Cancel):
                changes.cancelled += command.answers
            else:
                self._begin_end(command)
            command = self._next_command(wait=False)
        # Given up before the model has seen it.
        given_up = {answer.key for answer in changes.cancelled}
        changes.added = [answer for answer in changes.added if answer.key not in given_up]
        changes.cancelled = [answer for answer in changes.cancelled if answer.key in in_work]
        return changes

    def _next_command(self, *, wait: bool) -> _Command | None:
        try:
            return self._commands.get(timeout=_SILENCE_S) if wait else self._commands.get_nowait()
        except queue.Empty:
            return None

    def _begin_end(self, command: _End) -> None:
        now = time.monotonic()
        self._deadline = now if command.at_once or self._deadline is not None else now + GRACE_S
        self._in_server(lambda: self._close(_shutting_down(), with_open=False))

    def _tell(self, in_work: dict[int, Answer], results: Sequence[Result]) -> None:
        news = []
        for key, latest, is_finished in results:
            news.append((in_work[key], latest, is_finished))
            if is_finished:
                del in_work[key]
        if news:
            self._in_server(lambda: self._publish(news))

    def _tell_end(self, error: ApiError) -> None:
        self._in_server(lambda: self._close(error, with_open=True))

    def _in_server(self, call: Callable[[], None]) -> None:
        """Let the server's thread do `call`; where it has ended, no client is left to hear of it."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(call)


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code=SHUTTING_DOWN)
