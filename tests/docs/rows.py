"""What the rank pool runs for the documentation's training commands."""

from __future__ import annotations

import os


def train_in(folder: str, argv: list[str]) -> int:
    """Run `train_fsdp2.py` with `argv` in `folder`, in this process; returns its exit code."""
    import torch

    from mindspeed_llm.fsdp2.main import main

    before = os.getcwd()
    os.chdir(folder)
    try:
        return main(argv)
    finally:
        os.chdir(before)
        torch.use_deterministic_algorithms(False)
