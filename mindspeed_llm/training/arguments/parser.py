"""From the command line to the flat namespace of arguments, and `--help`."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from mindspeed_llm.errors import UserError
from mindspeed_llm.flag import Flag, Group
from mindspeed_llm.training.arguments.no_effect import NO_EFFECT, Inert
from mindspeed_llm.training.arguments.not_yet import NOT_YET, NOT_YET_VALUES
from mindspeed_llm.training.arguments.renamed import ALIASES, DEPRECATED, ELSEWHERE
from mindspeed_llm.training.arguments.tables import OF_FEATURES, TRAINING

_WIDTH = 112


@dataclass(frozen=True, kw_only=True)
class Surface:
    """The flags of a command, and what it says to others; by default those of training."""

    groups: tuple[Group, ...] = TRAINING
    of_features: tuple[Group, ...] = OF_FEATURES
    """Flags that a feature may register in place of the row here."""
    unlisted: frozenset[str] = frozenset()
    """Flags that are read, and that `--help` leaves out."""
    no_effect: Mapping[str, Inert] = field(default_factory=lambda: NO_EFFECT)
    not_yet: Mapping[str, str] = field(default_factory=lambda: NOT_YET)
    deprecated: Mapping[str, str] = field(default_factory=lambda: DEPRECATED)
    elsewhere: Mapping[str, str] = field(default_factory=lambda: ELSEWHERE)


_TRAINING = Surface()


class HasFlags(Protocol):
    """What is needed of a feature, see `features_manager.feature`."""

    name: str
    description: str

    def register_arguments(self, group: Any) -> None:
        """Add the feature's flags."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}. --help shows all flags")


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8, width=_WIDTH)


class _Names:
    """Notes the flags that a feature registers."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        self.found += names
        return argparse.ArgumentParser(add_help=False).add_argument(*names, **options)


def parse(
    argv: Sequence[str],
    features: Sequence[HasFlags] = (),
    *,
    program: str = "pretrain_gpt.py",
    description: str = "",
    surface: Surface = _TRAINING,
) -> argparse.Namespace:
    """The arguments that a command line says, by Megatron's names, before any check that looks at several of them.

    Beside the flags' own, the namespace has `given` (names of the arguments whose flags stand on the command line) and
    `notices` (lines about flags that were renamed, or that have no effect).

    Raises:
        UserError: an unknown flag (names the nearest), one that is refused, a value of the wrong kind.
        SystemExit: `--help`.
    """
    parser = make_parser(features, program=program, description=description, surface=surface)
    if "--help" in argv or "-h" in argv:
        if os.environ.get("RANK", "0") == "0":
            print(parser.format_help())
        raise SystemExit(0)
    actions = {name: action for action in parser._actions for name in action.option_strings}
    words, notices = _renamed(argv, surface)
    flags = _check_words(words, actions, surface)
    found, others = parser.parse_known_args(_joined(words, actions))
    if others:
        raise _stray(others[0], words, actions)
    values, inert = vars(found), surface.no_effect
    for flag in inert:
        values.pop(_dest(flag), None)
    given = sorted({actions[flag].dest for flag in flags if flag not in inert})
    notices += [f"{flag} has no effect: {inert[flag].reason}" for flag in dict.fromkeys(flags) if flag in inert]
    plain = {name: tuple(item) if isinstance(item, list) else item for name, item in values.items()}
    return argparse.Namespace(**plain, given=tuple(given), notices=tuple(notices))


def make_parser(
    features: Sequence[HasFlags] = (), *, program: str, description: str = "", surface: Surface = _TRAINING
) -> argparse.ArgumentParser:
    """A parser of all flags: those of the tables, those of features, and those without effect."""
    parser = _Parser(
        prog=program,
        usage=f"{program} [flags]",
        description=description,
        add_help=False,
        allow_abbrev=False,
        formatter_class=_Formatter,
    )
    registered = _Names()
    for feature in features:
        feature.register_arguments(registered)
    for group in surface.groups:
        _add_group(parser, group.title, group.flags)
    for group in surface.of_features:
        _add_group(parser, group.title, [flag for flag in group.flags if flag.name not in registered.found])
    for feature in features:
        feature.register_arguments(parser.add_argument_group(feature.name, feature.description))
    silent = parser.add_argument_group("No effect here")
    for name, inert in surface.no_effect.items():
        silent.add_argument(name, dest=_dest(name), help=_escaped(f"{inert.reason}."), **inert.parsing)
    for action in parser._actions:
        if not surface.unlisted.isdisjoint(action.option_strings):
            action.help = argparse.SUPPRESS
    return parser


def all_flags(groups: Iterable[Group] = (*TRAINING, *OF_FEATURES)) -> dict[str, Flag]:
    """The flags of tables, by name; those of features are not among them."""
    return {flag.name: flag for group in groups for flag in group.flags}


def _add_group(parser: argparse.ArgumentParser, title: str, flags: Sequence[Flag]) -> None:
    if not flags:
        return
    group = parser.add_argument_group(title)
    for flag in flags:
        group.add_argument(flag.name, dest=flag.dest, default=flag.default, help=_help(flag), **flag.parsing)


def _help(flag: Flag) -> str:
    if flag.default in (None, ()) or isinstance(flag.default, bool):
        return _escaped(flag.doc)
    shown = " ".join(map(str, flag.default)) if isinstance(flag.default, tuple) else flag.default
    return _escaped(f"{flag.doc.removesuffix('.')} (default {shown}).")


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _dest(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _renamed(argv: Sequence[str], surface: Surface) -> tuple[list[str], list[str]]:
    """The words with the names of today, and a line for each old name."""
    words, notices = [], []
    for word in argv:
        flag, equals, value = word.partition("=")
        if flag in surface.deprecated:
            notices.append(f"{flag} is the old name of {surface.deprecated[flag]}; it will go")
        words.append(surface.deprecated.get(flag, ALIASES.get(flag, flag)) + equals + value)
    return words, list(dict.fromkeys(notices))


def _joined(words: Sequence[str], actions: Mapping[str, argparse.Action]) -> list[str]:
    """The words with `--flag=-1e3` in place of `--flag -1e3`: argparse takes negative numbers with an exponent, or with
    nothing behind their point, for flags.
    """
    joined: list[str] = []
    for word in words:
        before = actions.get(joined[-1]) if joined else None
        if before is not None and before.nargs != 0 and re.match(r"-[\d.]", word) and _is_number(word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _check_words(words: Sequence[str], actions: dict[str, argparse.Action], surface: Surface) -> list[str]:
    """The flags among the words. Refuses those that are unknown or not available, before values are looked at."""
    flags = []
    for number, word in enumerate(words):
        if not re.match("--?[a-zA-Z]", word):
            continue
        flag, equals, value = word.partition("=")
        if flag in surface.not_yet:
            raise UserError(f"{flag} is not available: {surface.not_yet[flag]}")
        if flag not in actions:
            nearest = _nearest(flag, actions, surface.elsewhere)
            raise UserError(f"unknown flag {flag}; did you mean {nearest}? --help shows all flags")
        if not equals:
            value = words[number + 1] if number + 1 < len(words) else ""
        if (flag, value) in NOT_YET_VALUES:
            raise UserError(f"{flag} {value} is not available: {NOT_YET_VALUES[flag, value]}")
        if not value and actions[flag].nargs != 0 and (equals or number + 1 < len(words)):
            raise UserError(f"{flag} needs a value, found '' (an unset variable?)")
        if equals and actions[flag].nargs == 0:
            raise UserError(f"{flag} takes no value, found {value!r}: the flag alone is enough")
        flags.append(flag)
    return flags


def _stray(word: str, words: Sequence[str], actions: dict[str, argparse.Action]) -> UserError:
    """The error for a word that is neither a flag nor a value of one."""
    before = words[words.index(word) - 1] if words.index(word) else ""
    if before in actions and actions[before].nargs == 0:
        return UserError(f"{before} takes no value, found {word!r}: the flag alone is enough")
    if Path(word).suffix in (".sh", ".yaml", ".json", ".py"):
        return UserError(f"{word!r} belongs to no flag; settings of this backend are flags, not files")
    return UserError(f"{word!r} belongs to no flag; a value with spaces must stand in quotes. --help shows all flags")


def _nearest(flag: str, actions: dict[str, argparse.Action], elsewhere: Mapping[str, str]) -> str:
    # As the fields of the FSDP2 backend are written: --training.lr.
    wanted = "--" + flag.lstrip("-").rpartition(".")[2].replace("_", "-").lower()
    if wanted in actions:
        return wanted
    if wanted in elsewhere:
        return elsewhere[wanted]
    close = difflib.get_close_matches(wanted, actions, n=1, cutoff=0.75)
    # Of a long name often only a part is remembered.
    close = close or [name for name in actions if wanted.strip("-") in name][:1]
    return close[0] if close else max(actions, key=lambda n: difflib.SequenceMatcher(None, wanted, n).ratio())
