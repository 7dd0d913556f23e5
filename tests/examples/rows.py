"""What the rank pool runs for the examples of the Megatron backend."""

from __future__ import annotations

import os
from collections.abc import Sequence


def pretrain_in(folder: str, argv: Sequence[str]) -> int:
    """Run `pretrain_gpt.py` with `argv` in `folder`, in this process; returns its exit code."""
    from mindspeed_llm.training.main import main

    before = os.getcwd()
    os.chdir(folder)
    try:
        return main(list(argv))
    finally:
        os.chdir(before)
