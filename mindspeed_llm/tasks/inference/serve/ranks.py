"""The ranks of a job that serves: one decides what is done, all of its copy of the model do it."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from mindspeed_llm.platform import distributed
from mindspeed_llm.tasks.inference.backend import Backend
from mindspeed_llm.tasks.inference.serve.ticks import Runner, Tick


class Ranks(Protocol):
    """Where the rank that decides sends its ticks."""

    def send(self, tick: Tick) -> None:
        """Give all other ranks the tick."""
        ...


class OneRank:
    """No other ranks."""

    def send(self, tick: Tick) -> None:
        """Nobody to tell."""


class ManyRanks:
    """All ranks of the job (making it is a collective). The first rank of the first copy of the model decides.

    Ranks of other copies receive the ticks as well, so that they end with the others, but do no work.
    """

    def __init__(self, backend: Backend) -> None:
        # Objects travel through host memory, whatever the device.
        self._group = distributed.new_host_group()
        places: list[tuple[int, bool]] = [(0, False)] * distributed.world_size()
        dist.all_gather_object(places, (backend.replica, backend.is_first_of_replica), group=self._group)
        self._source = places.index((0, True))
        self.decides = distributed.rank() == self._source
        self._works = backend.replica == 0

    def send(self, tick: Tick) -> None:
        """Give all other ranks the tick. A collective with `receive`."""
        self._broadcast(tick)

    def receive(self) -> Tick:
        """The next tick, from the rank that decides. A collective with `send`."""
        return self._broadcast(None)

    def follow(self, runner: Runner | None) -> None:
        """Do what the deciding rank does, up to its last tick."""
        assert self._works == (runner is not None)
        while True:
            tick = self.receive()
            if runner is not None:
                runner.run(tick)
            if tick.is_last:
                return

    def _broadcast(self, tick: Tick | None) -> Tick:
        held: list[Tick | None] = [tick]
        dist.broadcast_object_list(held, src=self._source, group=self._group, device=torch.device("cpu"))
        received = held[0]
        assert received is not None
        return received
