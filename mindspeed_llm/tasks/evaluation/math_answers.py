r"""Answers in LaTeX, compared as the MATH benchmark does: read out of the text and brought to one spelling."""

from __future__ import annotations

import re

from mindspeed_llm.tasks.evaluation.filters import INVALID

_IN_DOLLARS = re.compile(r"\$(.*)\$")
_NUMBER = re.compile(r"(?:\$)?\d+(?:\.\d+)?(?![\w\d])")

# Applied in this order; a later rule sees what an earlier one left.
_SPELLINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\n", ""),
        (r"\\!", ""),  # a narrow blank
        (r"\\\\", r"\\"),
        (r"[td]frac", "frac"),
        (r"\\left|\\right", ""),
        (r"\^\{\\circ\}|\^\\circ", ""),
        (r"\\\$", ""),
        (r"\\text\{ .*$", ""),  # a unit after the number
        (r"\\%", ""),
        (r" \.", " 0."),
        (r"\{\.", "{0."),
        (r"^\.", "0."),
        (r"^[^=]{0,2}=([^=]*)$", r"\1"),  # "k = 3" names its variable
        (r"\\sqrt([^{])", r"\\sqrt{\1}"),
        (r" ", ""),
        (r"\\frac([^{])([^{])", r"\\frac{\1}{\2}"),
        (r"\\frac([^{])\{", r"\\frac{\1}{"),
        (r"^0\.5$", r"\\frac{1}{2}"),
        (r"^(0|-?[1-9]\d*)/(0|-?[1-9]\d*)$", r"\\frac{\1}{\2}"),
    )
)


def _after_last_equal_sign(text: str) -> str:
    return text.rsplit("=", maxsplit=1)[-1].lstrip(" ") if "=" in text else text


def _boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{}, with the braces in it; None where the box is not closed."""
    start = text.rfind("\\boxed")
    if not text.startswith("\\boxed{", start):
        return None
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if text[position] == "}" and depth == 0:
            return text[start + len("\\boxed{") : position]
    return None


def final_expression(text: str) -> str:
    r"""The answer in a text: the last \boxed{}, else what stands in dollars, else what follows an equal sign, else the
    last number, else the whole text. Of an equation the right side counts. INVALID where a box is not closed."""
    if "\\boxed" in text:
        boxed = _boxed(text)
        return INVALID if boxed is None else _after_last_equal_sign(boxed)
    if (in_dollars := _IN_DOLLARS.findall(text)) and (answer := _after_last_equal_sign(in_dollars[-1])):
        return answer
    if "=" in text:
        return _after_last_equal_sign(text).rstrip(".").split("\\n")[0]
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else text.strip()


def _spelled(expression: str) -> str:
    for pattern, replacement in _SPELLINGS:
        expression = pattern.sub(replacement, expression)
    return expression


def same_expression(answer: str, target: str) -> bool:
    """Whether an extracted answer is spelled like the one in the target, differences of notation taken out."""
    return answer != INVALID and _spelled(answer) == _spelled(final_expression(target))
