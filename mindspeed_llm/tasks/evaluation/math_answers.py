r"""Answers in LaTeX, compared as the MATH benchmark does: read out of the text and brought to one spelling."""

from __future__ import annotations

import re

from mindspeed_llm.tasks.evaluation.filters import INVALID

_IN_DOLLARS = re.compile(r"\$(.*)\$")
_NUMBER = re.compile(r"(?:\$)?\d+(?:\.\d+)?(?![\w\d])")
_SIGNED_NUMBER = re.compile(r"(?<![\w.])(?:(?<![)\]])(?<!\d\s)-)?\$?\d+(?:\.\d+)?(?!\w)")
_COMMAND = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}|\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{2}")

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
    first line where it has no words, else the last number with its sign, else the whole text. Of an equation the right
    side counts. INVALID where a box is not closed."""
    if (marked := _marked(text)) is not None:
        return marked
    if "=" in text:
        return _after_last_equal_sign(text).rstrip(".").split("\\n")[0]
    line = text.strip().split("\n", maxsplit=1)[0].strip().rstrip(".")
    if line and not _WORD.search(_COMMAND.sub("", line)):
        return line
    numbers = _SIGNED_NUMBER.findall(text)
    return numbers[-1] if numbers else text.strip()


def _marked(text: str) -> str | None:
    """What stands in a box or in dollars; None where a text has neither."""
    if "\\boxed" in text:
        boxed = _boxed(text)
        return INVALID if boxed is None else _after_last_equal_sign(boxed)
    in_dollars = _IN_DOLLARS.findall(text)
    return (_after_last_equal_sign(in_dollars[-1]) or None) if in_dollars else None


def final_expression_of_lm_eval(text: str) -> str:
    """The answer as lm-eval reads it: without box, dollars and equal sign it is the last number, without its sign.
    INVALID where there is no number either."""
    if (marked := _marked(text)) is not None:
        return marked
    if "=" in text:
        return _after_last_equal_sign(text).rstrip(".").split("\\n")[0]
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else INVALID


def _spelled(expression: str) -> str:
    for pattern, replacement in _SPELLINGS:
        expression = pattern.sub(replacement, expression)
    return expression


def same_expression(answer: str, target: str) -> bool:
    """Whether an extracted answer is spelled like the target, differences of notation taken out. A target that marks
    nothing by a box or dollars is the expression itself."""
    marked = _marked(target)
    return answer != INVALID and _spelled(answer) == _spelled(target.strip() if marked is None else marked)


def same_expression_of_lm_eval(answer: str, target: str) -> bool:
    """As lm-eval has it: the target is read as the answer is, and two texts in which it reads nothing are the same."""
    read = final_expression_of_lm_eval(target)
    return answer == read if INVALID in (answer, read) else _spelled(answer) == _spelled(read)
