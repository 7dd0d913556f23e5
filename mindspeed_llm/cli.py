"""How a command of this package ends: exit codes, error messages, and one message for many ranks.

Exit codes: 0 done, 1 a failure, 2 a mistake of the user (`UserError`), 130 interrupted with Ctrl-C.
"""

import contextlib
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from mindspeed_llm.errors import UserError

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

# While no process group exists, ranks cannot agree on who speaks. A mistake in the configuration is then met by every
# rank, so rank 0 speaks and the others hold still: torchrun ends the whole job as soon as one rank has ended, and an
# earlier end of another rank would cut rank 0 off in mid-sentence. A rank that is still alive after the wait has an
# error of its own and tells it. On further nodes the first local rank waits less than its neighbours, so that it
# speaks and its torchrun ends them.
FOLLOWER_WAIT_S = 10.0
NEIGHBOUR_WAIT_S = 2.0
# Ranks that lost the race for the message give the winner this long to finish writing it.
LOSER_WAIT_S = 1.0
# When a collective fails because a rank is gone, the others fail too, within moments of each other. Whoever has not
# said so after this time is the one that was lost.
LOST_RANK_WAIT_S = 3.0

_STORE_KEY = "mindspeed_error"
_ONE_LINE_LIMIT = 2000


def run(main: Callable[[list[str]], int | None], argv: list[str]) -> NoReturn:
    """Call `main(argv)` and end the process with its exit code (None counts as 0).

    A `UserError` ends with its message on stderr and code 2; any other exception with one line `rank r: Type: text`
    and code 1; Ctrl-C with code 130. Tracebacks appear with `--debug` in `argv` or MINDSPEED_DEBUG=1. Under torchrun
    an error is shown once, with its rank. `SystemExit` (`--help`) passes through.
    """
    try:
        code = main(argv) or 0
    except KeyboardInterrupt:
        if _rank() in (None, 0):
            print("interrupted", file=sys.stderr, flush=True)
        code = EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            sys.exit(EXIT_FAILURE)
        debug = debug_requested(argv)
        with_hint = not debug and not isinstance(error, UserError)
        trace = traceback.format_exc() if debug else ""
        _announce()
        if _speaks():
            print(
                trace + _lost_ranks(error) + describe(error, _rank(), with_hint=with_hint), file=sys.stderr, flush=True
            )
        elif debug:
            # Whoever debugs a hang or a crash wants the stack of every rank.
            print(f"rank {_rank()}:\n{trace}", file=sys.stderr, flush=True)
        code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILURE
    sys.exit(code)


def _output_is_closed() -> bool:
    """Whether whoever read our output has seen enough (`... --help | head`); there is nobody left to tell then."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    # Python would write what is left at exit, and complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def debug_requested(argv: list[str]) -> bool:
    """Whether tracebacks are wanted: `--debug` in `argv`, or MINDSPEED_DEBUG=1 in the environment."""
    return "--debug" in argv or os.environ.get("MINDSPEED_DEBUG") == "1"


def describe(error: Exception, rank: int | None, *, with_hint: bool = False) -> str:
    """The message for the user: the whole text of a `UserError`, one line `Type: text` for any other exception."""
    if isinstance(error, UserError):
        return f"error: {error}" if rank is None else f"rank {rank}: error: {error}"
    text = " ".join(str(error).split())
    if len(text) > _ONE_LINE_LIMIT:
        text = text[:_ONE_LINE_LIMIT] + " ..."
    line = f"rank {rank or 0}: {type(error).__name__}: {text}".rstrip(": ")
    return line + ("\n(set MINDSPEED_DEBUG=1 for the traceback)" if with_hint else "")


def _rank() -> int | None:
    """The global rank that torchrun gave this process; None outside of torchrun."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else None


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


def _speaks() -> bool:
    """Whether this rank is the one that shows the error; may wait first (see the constants above)."""
    rank = _rank()
    if rank is None or _world_size() == 1:
        return True
    store = _default_store()
    if store is not None:
        try:
            winner = store.compare_set(_STORE_KEY, "", str(rank)).decode()
        except Exception as gone:
            # The store lives in rank 0. Without it this error is most likely a consequence of that rank's end, but it
            # may be the only one that anybody gets to see.
            print(
                f"rank {rank}: lost rank 0, which holds the ranks' store: it does not answer ({type(gone).__name__})",
                file=sys.stderr,
                flush=True,
            )
            return True
        if winner == str(rank):
            return True
        time.sleep(LOSER_WAIT_S)
        return False
    if rank != 0:
        first_of_node = os.environ.get("LOCAL_RANK", str(rank)) == "0"
        time.sleep(FOLLOWER_WAIT_S if first_of_node else FOLLOWER_WAIT_S + NEIGHBOUR_WAIT_S)
    return True


def _announce() -> None:
    """Tell the other ranks that this one has ended with an error, and is not lost."""
    if _rank() is not None and (store := _default_store()) is not None:
        # torchrun ends the others as soon as it sees the lost one; the message must still get out.
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(Exception):  # without the store, `_speaks` says so
            store.set(f"{_STORE_KEY}/{_rank()}", "ended")


def _lost_ranks(error: Exception) -> str:
    """A line that names the ranks that are gone without a word; nothing where `error` is no broken collective, or where
    every rank has announced its end.
    """
    rank, store = _rank(), _default_store()
    if rank is None or store is None:
        return ""
    from mindspeed_llm.platform.distributed import is_broken_collective

    if not is_broken_collective(error):
        return ""
    keys = {other: f"{_STORE_KEY}/{other}" for other in range(_world_size())}
    deadline = time.monotonic() + LOST_RANK_WAIT_S
    try:
        while not store.check(list(keys.values())) and time.monotonic() < deadline:
            time.sleep(0.05)
        lost = [other for other, key in keys.items() if not store.check([key])]
    except Exception as gone:
        return (
            f"rank {rank}: lost the process that holds the ranks' store, rank 0 or torchrun ({type(gone).__name__})\n"
        )
    if not lost:
        return ""
    names = ", ".join(map(str, lost[:20])) + (f" and {len(lost) - 20} more" if len(lost) > 20 else "")
    return (
        f"rank {rank}: lost rank{'s' if len(lost) > 1 else ''} {names}: ended without a message (killed, out of "
        "memory, a crashed machine) or does not answer. What this rank saw of it:\n"
    )


def _default_store():
    """The key-value store of the default process group, or None where there is no group (or no torch) yet."""
    if "torch" not in sys.modules:
        return None
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.distributed_c10d._get_default_store()
