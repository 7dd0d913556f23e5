"""The work of the model, tick by tick: what one rank decides, and all ranks of a copy do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mindspeed_llm.tasks.inference.generation import Completion, Request
from mindspeed_llm.tasks.inference.serve.scoring import Scored, Scorer, Scoring

Work = Request | Scoring
Result = tuple[int, Completion | Scored, bool]
"""(key of the work, what there is of it so far, whether that is all)."""


@dataclass(frozen=True, kw_only=True)
class Tick:
    """What changes before the next step."""

    additions: tuple[tuple[int, Work], ...] = ()
    """(key, work): keys are given out once."""
    cancellations: tuple[int, ...] = ()
    """Keys of work that nobody waits for any more."""
    is_last: bool = False
    """No step follows: all ranks leave."""


class SteppedEngine(Protocol):
    """What is needed of `engine.Engine`."""

    @property
    def busy(self) -> bool: ...
    def add(self, request: Request) -> int: ...
    def cancel(self, number: int) -> None: ...
    def step(self) -> list[tuple[int, Completion, bool]]: ...


class Runner:
    """Does the ticks on one rank. The ranks of one copy of a model are given the same ticks, and do the same."""

    def __init__(self, engine: SteppedEngine, scorer: Scorer) -> None:
        self._engine, self._scorer = engine, scorer
        self._numbers: dict[int, int] = {}
        self._keys: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        """Whether a tick without additions has work to do."""
        return self._engine.busy or self._scorer.busy

    def run(self, tick: Tick) -> list[Result]:
        """Take over what changes, and do a step."""
        for key, work in tick.additions:
            if isinstance(work, Scoring):
                self._scorer.add(key, work)
            else:
                self._numbers[key] = self._engine.add(work)
                self._keys[self._numbers[key]] = key
        for key in tick.cancellations:
            self._scorer.cancel(key)
            # What has ended in the meantime has no number any more.
            if (number := self._numbers.pop(key, None)) is not None:
                del self._keys[number]
                self._engine.cancel(number)
        if tick.is_last:
            return []
        results: list[Result] = [(key, scored, True) for key, scored in self._scorer.step()]
        if self._engine.busy:
            for number, completion, is_finished in self._engine.step():
                key = self._keys[number]
                results.append((key, completion, is_finished))
                if is_finished:
                    del self._keys[number], self._numbers[key]
        return results
