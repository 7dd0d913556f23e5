"""What the rank pool runs for conversations."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Sequence
from unittest import mock


def talk(folder: str, typed: Sequence[str], seconds: float) -> tuple[int, str]:
    """`--task chat` with lines that take so long to be typed; the exit code, and what this rank prints."""
    from mindspeed_llm.tasks.inference import chat
    from mindspeed_llm.tasks.inference.main import main

    lines = iter(typed)

    def slowly(prompt: str) -> str:
        time.sleep(seconds)
        return next(lines)

    printed = io.StringIO()
    waiting = mock.patch.object(chat, "WAITING_S", seconds / 4)
    with waiting, mock.patch("builtins.input", slowly), contextlib.redirect_stdout(printed):
        code = main(["--load", folder, "--task", "chat", "--max-new-tokens", "3"])
    return code, printed.getvalue()
