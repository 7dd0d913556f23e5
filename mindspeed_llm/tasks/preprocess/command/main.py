"""The command `preprocess_data.py`: what the flags ask for, one after the other.

Tokenizers and readers of columnar files are imported only after the flags have passed their checks, so that a typo is
answered at once.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from mindspeed_llm.observability.log import get_logger, setup_logging
from mindspeed_llm.tasks.preprocess.command import signals
from mindspeed_llm.tasks.preprocess.command.arguments import Arguments
from mindspeed_llm.tasks.preprocess.command.checks import check_mode, notices
from mindspeed_llm.tasks.preprocess.command.parser import parse
from mindspeed_llm.tasks.preprocess.command.signals import Terminated

_LOG = get_logger(__name__)


def main(argv: Sequence[str]) -> int:
    """Preprocess, check, merge or inspect as `argv` says; returns the exit code.

    Raises:
        UserError: a mistake in the flags, the data or the files.
        SystemExit: `--help`, or the end by SIGTERM.
    """
    arguments = parse(argv)
    check_mode(arguments)
    setup_logging()
    for notice in notices(arguments):
        _LOG.info(notice)
    with signals.listening():
        _run(arguments)
    return 0


def _run(arguments: Arguments) -> None:
    try:
        try:
            _dispatch(arguments)
        except Exception:
            # An end that was asked for has consequences elsewhere (workers that are gone), which are not the reason.
            signals.raise_received()
            raise
    except Terminated:
        print("ended by SIGTERM", file=sys.stderr, flush=True)
        if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
            # The interpreter would wait for the calls of the tokenizer that they are at; nothing else is left to do.
            sys.stdout.flush()
            os._exit(143)
        raise


def _dispatch(arguments: Arguments) -> None:
    if arguments.inspect is not None:
        _inspect(arguments)
    elif arguments.merge_group_keys:
        _merge(arguments)
    else:
        _preprocess(arguments)


def _preprocess(arguments: Arguments) -> None:
    from mindspeed_llm.tasks.preprocess.command.job import prepare
    from mindspeed_llm.tasks.preprocess.command.plan import plan_lines
    from mindspeed_llm.tasks.preprocess.command.run import run

    job, first = prepare(arguments)
    if arguments.check:
        print("\n".join(plan_lines(job, first)))
    else:
        run(job)


def _merge(arguments: Arguments) -> None:
    from mindspeed_llm.tasks.preprocess.command.merge import check_parts, find_parts, merge
    from mindspeed_llm.tasks.preprocess.command.publish import check_prefix

    assert arguments.input is not None and arguments.output_prefix is not None
    folder, prefix = Path(arguments.input), Path(arguments.output_prefix)
    check_prefix(prefix, [prefix.with_name(f"{prefix.name}_{key}") for key in arguments.merge_group_keys])
    if arguments.check:
        parts = find_parts(folder, arguments.merge_group_keys, prefix)
        check_parts(parts)
        print("\n".join(f"{prefix}_{key}: {', '.join(part.name for part in found)}" for key, found in parts.items()))
    else:
        print("\n".join(merge(folder, arguments.merge_group_keys, prefix)))


def _inspect(arguments: Arguments) -> None:
    from mindspeed_llm.tasks.preprocess.command.job import tokenizer_options
    from mindspeed_llm.tasks.preprocess.inspection import inspect_prefix
    from mindspeed_llm.tasks.preprocess.tokenizers import load_tokenizer

    assert arguments.inspect is not None
    given = {name for name in arguments.given if name.startswith("tokenizer_") or name in ("vocab_file", "merge_file")}
    tokenizer = load_tokenizer(tokenizer_options(arguments)) if given else None
    inspect_prefix(
        arguments.inspect,
        num=arguments.num,
        html=arguments.html,
        tokenizer=tokenizer,
        shorten=not arguments.whole,
    )
