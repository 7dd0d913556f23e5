"""Which commands of the documentation score a model."""

from __future__ import annotations

import re

from tests.docs.pages import Command

PROGRAM = "evaluation.py"
SCRIPT = re.compile(r"examples/mcore/[\w.-]+/evaluate_\w+\.sh")


def scores_a_model(command: Command) -> bool:
    """Whether a command runs `evaluation.py`, or a script of it."""
    match command.words:
        case ["bash", script, *_]:
            return SCRIPT.fullmatch(script) is not None
    return PROGRAM in command.words
