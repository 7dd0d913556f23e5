"""The command `convert_ckpt_v2.py`."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from mindspeed_llm.tasks.checkpoint.command_line import parse
from mindspeed_llm.tasks.checkpoint.request import ConversionRequest

_ENDS = (signal.SIGTERM, signal.SIGHUP)


class _Ended(SystemExit):
    """The end by a signal; `code` is 128 and its number, as shells have it."""


def main(argv: list[str]) -> None:
    """Convert as `argv` says and print what was done.

    Raises:
        UserError: what is asked for cannot be done.
        SystemExit: `--help`, or the end by SIGTERM or SIGHUP; what was written is removed then, as with Ctrl-C.
    """
    request = parse(argv)
    try:
        with _listening():
            _convert_or_end(request)
    except _Ended as ended:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"ended by {signal.Signals(ended.code - 128).name}", file=sys.stderr, flush=True)
        raise


@contextlib.contextmanager
def _listening() -> Iterator[None]:
    """Answer to both signals within the block."""
    # nohup ignores the one that a terminal sends when it is closed, and so it stays.
    ours = [number for number in _ENDS if signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    # Once is enough: another one would end the cleaning up.
    for each in _ENDS:
        signal.signal(each, signal.SIG_IGN)
    raise _Ended(128 + number)


def _convert_or_end(request: ConversionRequest) -> None:
    try:
        _convert(request)
    except Exception as error:
        # torch's writer of archives, ended in the middle, puts an error about the half archive in front of the end.
        cause = error.__context__
        while cause is not None and not isinstance(cause, _Ended | KeyboardInterrupt):
            cause = cause.__context__
        if cause is None:
            raise
        raise cause from None


def _convert(request: ConversionRequest) -> None:
    # What is imported stays: looking for garbage among its million objects, now and later, only costs time.
    gc.disable()
    import torch

    from mindspeed_llm.tasks.checkpoint.convert import convert
    from mindspeed_llm.tasks.checkpoint.dry_run import lines
    from mindspeed_llm.tasks.checkpoint.prepare import prepare
    from mindspeed_llm.tasks.checkpoint.progress import Progress
    from mindspeed_llm.tasks.checkpoint.report import table

    gc.freeze()
    gc.enable()
    if request.dry_run:
        conversion = prepare(request)
        tensors = conversion.model.hf_tensors()
        for line in lines(conversion.plan, conversion.loaded.source, tensors, conversion.adapter_summary):
            print(line)
        return
    torch.set_num_threads(1)  # the threads are ours: one per slab
    print(table(convert(request, progress=Progress()).report, request.save_dir))
