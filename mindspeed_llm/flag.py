"""One flag as data, and the kinds of flags that there are."""

from __future__ import annotations

import argparse
import ast
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag, where its value goes, and who reads it."""

    name: str
    doc: str
    """For `--help`: without the default, which is added."""
    dest: str
    """The attribute of the arguments, by Megatron's name."""
    default: Any
    used_by: tuple[str, ...]
    """Modules below `mindspeed_llm` that read the attribute."""
    parsing: Mapping[str, Any]
    """What `argparse.add_argument` gets besides."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Flags that `--help` shows together."""

    title: str
    flags: tuple[Flag, ...]


def value(
    name: str,
    kind: Callable[[str], Any],
    default: Any,
    doc: str,
    used_by: str,
    *,
    dest: str | None = None,
    choices: Sequence[Any] | None = None,
    metavar: str | None = None,
) -> Flag:
    """A flag with one value."""
    parsing: dict[str, Any] = {"type": one_of(choices, kind) if choices else kind}
    parsing["metavar"] = "|".join(map(str, choices)) if choices else metavar or _METAVARS.get(kind, "X")
    return _flag(name, dest, default, doc, used_by, parsing)


def several(
    name: str,
    kind: Callable[[str], Any],
    default: Any,
    doc: str,
    used_by: str,
    *,
    dest: str | None = None,
    metavar: str | tuple[str, ...] | None = None,
    nargs: str | int = "+",
) -> Flag:
    """A flag with several values, separated by blanks."""
    parsing = {"type": kind, "nargs": nargs, "metavar": metavar or _METAVARS.get(kind, "X")}
    return _flag(name, dest, default, doc, used_by, parsing)


def optional(name: str, kind: Callable[[str], Any], const: Any, doc: str, used_by: str, *, metavar: str) -> Flag:
    """A flag whose value may be left out, and is `const` then; without the flag it is None."""
    return _flag(name, None, None, doc, used_by, {"type": kind, "nargs": "?", "const": const, "metavar": metavar})


def switch(name: str, doc: str, used_by: str, *, dest: str | None = None) -> Flag:
    """A flag without value that sets True."""
    return _flag(name, dest, False, doc, used_by, {"action": "store_true"})


def negative(name: str, dest: str, doc: str, used_by: str) -> Flag:
    """A flag without value that sets False."""
    return _flag(name, dest, True, doc, used_by, {"action": "store_false"})


def _flag(name: str, dest: str | None, default: Any, doc: str, used_by: str, parsing: Mapping[str, Any]) -> Flag:
    return Flag(
        name=name,
        doc=doc,
        dest=dest or name.lstrip("-").replace("-", "_"),
        default=default,
        used_by=tuple(used_by.split()),
        parsing=parsing,
    )


# Kinds of values: functions of the text on the command line. Each raises argparse.ArgumentTypeError.


def whole(at_least: int) -> Callable[[str], int]:
    """A whole number of `at_least` or more."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or number < at_least:
            raise argparse.ArgumentTypeError(f"expected a whole number of {at_least} or more, found {text!r}")
        return number

    return convert


count = whole(0)
positive = whole(1)


def integer(text: str) -> int:
    """Any whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {text!r}") from None


def number(text: str) -> float:
    """Any finite number."""
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if found - found != 0.0:
        raise argparse.ArgumentTypeError(f"expected a number, found {text!r}")
    return found


def amount(text: str) -> float:
    """A number of 0 or more."""
    found = number(text)
    if found < 0:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, found {text!r}")
    return found


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    found = number(text)
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, found {text!r}")
    return found


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers of 0 or more with commas between them."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"expected whole numbers with commas, such as 5,5,4,4; found {text!r}")
    return tuple(map(int, parts))


def layer_pattern(text: str) -> int | tuple[int, ...]:
    """A whole number, or a list with a 0 or 1 for each layer in Python's notation, such as ([0]*3+[1]*21)."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return tuple(_list_of_bits(ast.parse(text, mode="eval").body))
    except (SyntaxError, ValueError):
        raise argparse.ArgumentTypeError(
            f"expected a whole number, or a list of 0 and 1 such as ([0]*3+[1]*21); found {text!r}"
        ) from None


def _list_of_bits(node: ast.expr) -> list[int]:
    """Evaluates lists, their sums and their multiples, and nothing else."""
    if isinstance(node, ast.List):
        bits = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
        if all(bit in (0, 1) for bit in bits):
            return [int(bit) for bit in bits if bit is not None]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _list_of_bits(node.left) + _list_of_bits(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        bits, times = node.left, node.right
        if isinstance(bits, ast.Constant):
            bits, times = times, bits
        if isinstance(times, ast.Constant) and isinstance(times.value, int) and 0 <= times.value <= 100_000:
            return _list_of_bits(bits) * times.value
    raise ValueError(ast.dump(node))


def one_of(choices: Sequence[Any], kind: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """One of `choices`."""

    def convert(text: str) -> Any:
        found = kind(text)
        if found not in choices:
            names = {str(choice).lower(): choice for choice in choices}
            close = difflib.get_close_matches(text.lower(), names, n=1)
            hint = f"; did you mean {names[close[0]]}?" if close else ""
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(map(str, choices))}; found {text!r}{hint}")
        return found

    return convert


_METAVARS: dict[Any, str] = {
    count: "N",
    positive: "N",
    integer: "N",
    number: "X",
    amount: "X",
    fraction: "X",
    numbers: "N,N,...",
    layer_pattern: "N|LIST",
    str: "TEXT",
}
