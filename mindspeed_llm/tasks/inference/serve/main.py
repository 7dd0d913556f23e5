"""Serve a model that has been loaded, on all ranks of the job, until a signal comes.

The thread that has loaded the model goes on to own it. It is the main thread, so that signals reach it.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from mindspeed_llm.platform import distributed
from mindspeed_llm.tasks.inference.causal_lm import CausalLM
from mindspeed_llm.tasks.inference.engine import Engine
from mindspeed_llm.tasks.inference.prompt_format import prompt_format
from mindspeed_llm.tasks.inference.serve.check import KEY_VARIABLE, check_serve
from mindspeed_llm.tasks.inference.serve.ranks import ManyRanks, OneRank, Ranks
from mindspeed_llm.tasks.inference.serve.scoring import Scorer
from mindspeed_llm.tasks.inference.serve.service import Service
from mindspeed_llm.tasks.inference.serve.ticks import Runner

_LOG = logging.getLogger("mindspeed_llm")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MOST_POSITIONS = 8192
"""Positions of each slot where --max-length does not say: models name more than memory has room for."""


def serve(lm: CausalLM, args: Namespace) -> int:
    """Answer clients until Ctrl-C or SIGTERM. All ranks of the job call it; the first of them listens.

    Args:
        args: of inference.py; `check_serve` has been asked before the model was loaded.

    Returns:
        The exit code: 130 after Ctrl-C, 143 after SIGTERM; 0 on ranks that do not listen.

    Raises:
        UserError: the address cannot be listened on, or there is no memory for the texts.
        Exception: whatever the model raised; clients have been told that it failed.
    """
    length = min(lm.max_length, args.max_length or _MOST_POSITIONS)
    ranks = ManyRanks(lm.backend) if distributed.world_size() > 1 else None
    runner = make_runner(lm, length) if lm.backend.replica == 0 else None
    if ranks is not None and not ranks.decides:
        # The rank that decides is told to end as well; a rank that ended by itself would break off its work.
        with _answering_signals(lambda number: None):
            ranks.follow(runner)
        return 0
    assert runner is not None, "the rank that decides has a part of the first copy"
    return _host(lm, args, runner, ranks or OneRank(), length=length)


def make_runner(lm: CausalLM, length: int) -> Runner:
    """What does the work: `batch_size` texts of `length` tokens at once. Raises UserError where there is no memory."""
    slots = lm.batch_size
    return Runner(
        Engine(lm.backend, lm.decode, slots=slots, length=length), Scorer(lm.backend, slots=slots, length=length)
    )


def model_name(path: str) -> str:
    """What clients call the model: the last part of its path."""
    return Path(path).resolve().name or "model"


def _host(lm: CausalLM, args: Namespace, runner: Runner, ranks: Ranks, *, length: int) -> int:
    """Listen, and decide what the ranks do."""
    address = check_serve(args)
    template = prompt_format(args, lm.tokenizer, is_chat=True)
    model = model_name(args.load)
    service = Service(lm, runner, ranks, address=address, template=template, model=model, length=length)
    received: list[int] = []

    def end(number: int) -> None:
        # A second signal does not wait for answers.
        service.end(at_once=bool(received))
        received.append(number)

    chats = "no chat template: completions only" if template is None else f"chats in {template.name}"
    _LOG.info("model %r: texts of up to %d tokens, %d at once; %s", model, length, lm.batch_size, chats)
    if args.max_length is None and length < lm.max_length:
        _LOG.info("the model itself has %d positions: --max-length N serves longer texts", lm.max_length)
    if lm.backend.replicas > 1:
        _LOG.info("of %d copies of the model one serves; the others do nothing", lm.backend.replicas)
    key = f"no key is needed ({KEY_VARIABLE} sets one)" if address.api_key is None else "a key is needed"
    with _answering_signals(end):
        _LOG.info("serving at %s, %s; Ctrl-C ends it (twice: at once)", service.url, key)
        service.run()
    _LOG.info("ended by %s", signal.Signals(received[0]).name)
    return 128 + received[0]


@contextlib.contextmanager
def _answering_signals(receive: Callable[[int], None]) -> Iterator[None]:
    """Call `receive` with the number of each signal to end, within the block."""

    def handle(number: int, frame: FrameType | None) -> None:
        receive(number)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
