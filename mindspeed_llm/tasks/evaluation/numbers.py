"""The number that a worked answer ends in."""

from __future__ import annotations

import re
from fractions import Fraction

from mindspeed_llm.tasks.evaluation.filters import INVALID

# A minus counts where it can be neither a subtraction (after a digit, a letter or a closing bracket) nor a dash (before
# a blank).
_NUMBER = re.compile(
    r"(?P<minus>(?<![\w)\]])(?<!\d\s)-(?=[$.\d]))?\$?(?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?P<decimals>\.\d+)?(?:/(?P<under>[1-9]\d*))?"
)
# What follows the marks with which answers announce their result, the surest mark first.
_ANNOUNCED = (re.compile(r"####(.*)"), re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"))
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_MOST_DIGITS = 1000
"""A model that repeats itself writes longer ones, which Python refuses to read and to print."""
_NEXT_QUESTION = re.compile(r"^\s*(?:Question|Q):", re.MULTILINE)


def _numbers(text: str) -> list[Fraction]:
    found = []
    for match in _NUMBER.finditer(text):
        whole, decimals = match["whole"], match["decimals"]
        if (whole is None and decimals is None) or len(match[0]) > _MOST_DIGITS:
            continue
        value = Fraction((whole or "0").replace(",", "") + (decimals or "")) / int(match["under"] or 1)
        found.append(-value if match["minus"] else value)
    return found


def final_number(text: str) -> str:
    r"""The number that an answer gives, as "18", "-3" or "1/2"; INVALID where there is none.

    The first line after "####" counts, else the last \boxed{}, else the last number of the text. What follows a next
    "Question:" is not part of the answer. Numbers are compared by value, so "18.0" reads like "18".
    """
    text = _FRACTION.sub(r"\1/\2", _NEXT_QUESTION.split(text, maxsplit=1)[0]).replace("{,}", ",")
    for position, pattern in zip((0, -1), _ANNOUNCED, strict=True):
        if (marked := pattern.findall(text)) and (numbers := _numbers(marked[position])):
            return str(numbers[0])
    numbers = _numbers(text)
    return str(numbers[-1]) if numbers else INVALID


def same_number(answer: str, target: str) -> bool:
    """Whether an extracted number equals the one that a worked target ends in."""
    return answer != INVALID and answer == final_number(target)
