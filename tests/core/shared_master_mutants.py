"""Deliberate faults of shared masters; each must make the comparison with torch's optimizer fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor


@contextlib.contextmanager
def half_to_even() -> Iterator[None]:
    """A master in the middle between two parameters goes to the even one, as in torch's cast."""
    from mindspeed_llm.core import shared_master

    def split(master: Tensor, parameter: Tensor, remainder: Tensor) -> None:
        original(master, parameter, remainder)
        parameter.copy_(master.view_as(parameter))

    original = shared_master.split
    with mock.patch.object(shared_master, "split", split):
        yield


@contextlib.contextmanager
def lost_remainder() -> Iterator[None]:
    """Each step starts from the bf16 parameters."""
    from mindspeed_llm.core import shared_master

    def join(parameter: Tensor, remainder: Tensor, master: Tensor) -> None:
        original(parameter, torch.zeros_like(remainder), master)

    original = shared_master.join
    with mock.patch.object(shared_master, "join", join):
        yield


@contextlib.contextmanager
def no_carry() -> Iterator[None]:
    """The upper half is taken as it is: rounded towards zero."""
    from mindspeed_llm.core import shared_master

    def split(master: Tensor, parameter: Tensor, remainder: Tensor) -> None:
        lower, upper = shared_master._halves(master)
        remainder.copy_(lower)
        shared_master._bits(parameter).copy_(upper)

    with mock.patch.object(shared_master, "split", split):
        yield


@contextlib.contextmanager
def not_gathered() -> Iterator[None]:
    """Each data-parallel rank rounds the masters that it has loaded, and does not tell the others."""
    from mindspeed_llm.core import shared_master

    with mock.patch.object(shared_master._SharingDistributedOptimizer, "gather_parameters", lambda self: None):
        yield


MUTANTS: dict[str | None, Callable[[], contextlib.AbstractContextManager[None]]] = {
    None: contextlib.nullcontext,
    **{function.__name__: function for function in (half_to_even, lost_remainder, no_carry, not_gathered)},
}
