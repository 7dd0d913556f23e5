"""Which commands of the documentation ask a model."""

from __future__ import annotations

import re

from tests.docs.pages import Command

PROGRAM = "inference.py"
SCRIPT = re.compile(r"examples/mcore/[\w.-]+/generate_\w+\.sh")


def asks_a_model(command: Command) -> bool:
    """Whether a command runs `inference.py`, or a script of it."""
    match command.words:
        case ["bash", script, *_]:
            return SCRIPT.fullmatch(script) is not None
    return PROGRAM in command.words
