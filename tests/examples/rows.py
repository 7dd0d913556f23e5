"""What the rank pool runs for the examples of the Megatron backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence


def pretrain_in(folder: str, argv: Sequence[str]) -> int:
    """Run `pretrain_gpt.py` with `argv` in `folder`, in this process; returns its exit code."""
    from mindspeed_llm.training.main import main

    return _run_in(folder, main, argv)


def posttrain_in(folder: str, argv: Sequence[str]) -> int:
    """Run `posttrain_gpt.py` in the same way."""
    from mindspeed_llm.tasks.posttrain.main import main

    return _run_in(folder, main, argv)


def infer_in(folder: str, argv: Sequence[str]) -> int:
    """Run `inference.py` in the same way."""
    from mindspeed_llm.tasks.inference.main import main

    return _run_in(folder, main, argv)


def evaluate_in(folder: str, argv: Sequence[str]) -> int:
    """Run `evaluation.py` in the same way."""
    from mindspeed_llm.tasks.evaluation.main import main

    return _run_in(folder, main, argv)


def _run_in(folder: str, main: Callable[[list[str]], int], argv: Sequence[str]) -> int:
    before = os.getcwd()
    os.chdir(folder)
    try:
        return main(list(argv))
    finally:
        os.chdir(before)
