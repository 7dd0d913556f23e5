"""The letter of the option that a written answer names."""

from __future__ import annotations

import re

from mindspeed_llm.tasks.evaluation.filters import INVALID, Filter

# What may stand between an announcement and its letter: brackets, quotes, emphasis.
_OPEN = r"[\s(（\[【\"'“*]*"
_BLANKS = re.compile(r"\s{2,}")


def announced_letters(letters: str, *, several: bool = False, lone: bool = True) -> Filter:
    r"""Reads the letter that an answer gives, INVALID where it gives none or leaves it open.

    The last announcement counts ("the answer is (B)", "Answer: B", "答案是B", "\boxed{B}"); without one the letter that
    the answer begins with ("B", "b.", "B. Paris"); without that the one letter that stands alone anywhere. An article
    ("A dog") is no option.

    Args:
        letters: the options.
        several: read all letters that stand together ("AD", "A, D"), where questions have several right options.
        lone: whether the one letter that stands alone anywhere counts.
    """
    one = f"[{letters}]"
    group = rf"({one}(?:[,、，]?\s?{one})*)" if several else f"({one})"
    end = r"(?![A-Za-z])"
    announced = re.compile(
        rf"(?:(?i:\banswer|\boption|\bchoice)\s*(?:(?i:is)\b\s*:?|[:：])|答案[是为应选：:\s]*|(?:应选|应选择|选择|选)\s*[：:]?"
        rf"|\\boxed\{{(?:\\text\{{)?)(?:{_OPEN}(?i:option))?{_OPEN}{group}{end}"
    )
    alone = re.compile(rf"^[\W_]*{group}[\W_]*$", re.IGNORECASE)
    leading = re.compile(rf"^{_OPEN}{group}(?=\s*$|\s*[.:)\]、：，,。】）*])", re.MULTILINE)
    standing = re.compile(rf"(?<![A-Za-z])({one}){end}")

    def apply(text: str) -> str:
        text = _without_long_blanks(text.strip())
        if match := alone.match(text.split("\n", maxsplit=1)[0]):
            return _plain(match[1])
        if found := announced.findall(text):
            return _plain(found[-1])
        if match := leading.match(text):
            return _plain(match[1])
        alone_anywhere = set(standing.findall(text)) if lone else set()
        if len(alone_anywhere) != 1:
            return INVALID
        letter = alone_anywhere.pop()
        # An article looks like an option unless brackets set it off.
        return letter if letter != "A" or "(A)" in text else INVALID

    return apply


def _without_long_blanks(text: str) -> str:
    """The text with two blanks in place of more, so that patterns have few ways to part them; line ends stay line ends.

    Two, as one blank may stand between letters that belong together, and more may not.
    """
    return _BLANKS.sub(lambda run: "\n\n" if "\n" in run[0] else "  ", text)


def _plain(text: str) -> str:
    return "".join(sorted({letter for letter in text.upper() if letter.isalpha()}))
