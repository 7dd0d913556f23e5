"""The pattern language of module lists such as `parallel.fsdp_modules`.

    {*}      one integer, such as the number of a layer
    {a-b}    one integer from a to b, both included
    *        any text, dots included, also none
    ?        one character
    other    itself

A pattern matches a whole module name: `model.layers.{0-3}` matches `model.layers.2`, not `model.layers.2.mlp`.
"""

import re
from functools import lru_cache

from mindspeed_llm.errors import UserError

# {*}, {a-b}, or a brace that belongs to neither.
_TOKEN = re.compile(r"(?P<any>\{\*\})|\{(?P<low>\d+)-(?P<high>\d+)\}|(?P<brace>[{}])|(?P<text>\*)|(?P<char>\?)")
_LONGEST_RANGE = 10_000
_LANGUAGE = "{*} is one integer, {a-b} an integer from a to b, * any text, ? one character"


@lru_cache(maxsize=1024)
def compile_pattern(text: str) -> re.Pattern[str]:
    """The regular expression for pattern `text`; it matches whole names only, whichever of its methods is called.

    Raises `UserError` for an empty pattern, braces that are neither `{*}` nor `{a-b}`, and a range that holds nothing
    or more than any model has.
    """
    if not text or text != text.strip():
        raise UserError(f"the module pattern {text!r} is empty or has spaces around it")
    pieces = []
    end = 0
    for token in _TOKEN.finditer(text):
        pieces.append(re.escape(text[end : token.start()]))
        end = token.end()
        if token["any"]:
            pieces.append("[0-9]+")
        elif token["low"]:
            low, high = int(token["low"]), int(token["high"])
            if low > high:
                raise UserError(f"the module pattern {text!r} has the empty range {token[0]}: {low} is above {high}")
            if high - low >= _LONGEST_RANGE:
                raise UserError(f"the module pattern {text!r} has a range of more than {_LONGEST_RANGE} integers")
            pieces.append(f"(?:{'|'.join(str(number) for number in range(low, high + 1))})")
        elif token["brace"]:
            raise UserError(
                f"the module pattern {text!r} has a stray {token[0]!r} at character {token.start() + 1}: {_LANGUAGE}"
            )
        else:
            pieces.append(".*" if token["text"] else ".")
    pieces.append(re.escape(text[end:]))
    return re.compile(rf"\A{''.join(pieces)}\Z", re.DOTALL)


def matches(pattern: str, name: str) -> bool:
    """Whether the module `name` is one that `pattern` means. `UserError` as `compile_pattern`."""
    return compile_pattern(pattern).match(name) is not None
