"""Reading an answer out of a text. `regex`, `exact_match` and their order of steps are lm-eval's."""

from __future__ import annotations

import re
import string
from collections.abc import Callable

Filter = Callable[[str], str]

INVALID = "[invalid]"
"""What a filter gives where it finds nothing; no target reads like it."""

_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def as_it_is(text: str) -> str:
    """The text itself."""
    return text


def regex(pattern: str, *, take: int = 0) -> Filter:
    """The match at position `take` (-1: the last), stripped; of several groups the first that is not empty."""
    compiled = re.compile(pattern)

    def apply(text: str) -> str:
        found = compiled.findall(text)
        if not found:
            return INVALID
        match = found[take]
        if isinstance(match, tuple):
            match = next((group for group in match if group), INVALID)
        return match.strip()

    return apply


def chain(*filters: Filter) -> Filter:
    """One filter after the other."""

    def apply(text: str) -> str:
        for step in filters:
            text = step(text)
        return text

    return apply


FIRST_LINE: Filter = chain(regex(r"^(.*?)(?=\n|$)"), str.strip, regex(r"^(.*?)\s*$"))
"""The first line without blanks around it."""


def exact_match(
    *, remove: tuple[str, ...] = (), ignore_case: bool = False, ignore_punctuation: bool = False
) -> Callable[[str, str], bool]:
    """Whether two texts are the same after the patterns in `remove`, case and punctuation are taken out of both."""
    patterns = [re.compile(pattern) for pattern in remove]

    def plain(text: str) -> str:
        for pattern in patterns:
            text = pattern.sub("", text)
        text = text.lower() if ignore_case else text
        return text.translate(_WITHOUT_PUNCTUATION) if ignore_punctuation else text

    return lambda answer, target: plain(answer) == plain(target)
